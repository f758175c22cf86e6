"""GPU code over KV blocks: attention in place, copies, quantised formats; needs torch."""
