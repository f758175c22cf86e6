"""GPUs by the CUDA driver alone: memory, streams, batched copies, sharing. Nothing loads early."""
