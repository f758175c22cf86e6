"""A process whose kernels run by Triton's interpreter, decoding from a daemon's blocks in place.

python -m paged_interpreted ADDRESS TOKENS.npy CONTEXT LOGITS.npy: restores what is stored of the
first CONTEXT tokens and writes the logits of the others, the last of which is decoded by itself.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before the first module with kernels
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import numpy as np
import torch

from kvstore.client import KVClient
from kvstore.engines import smollm2
from kvstore.engines.identity import spec_of
from kvstore.engines.in_place import restore_in_place
from kvstore.engines.paged import PagedDecoder
from kvstore.kernels import interpreter


def main(address: str, tokens: str, context_tokens: str, target: str) -> None:
    torch.set_num_threads(1)
    interpreter.install()
    ids, known = torch.from_numpy(np.load(tokens)), int(context_tokens)
    model, _ = smollm2.load()
    spec = spec_of(model, name=smollm2.NAME)
    with KVClient.connect(address) as client:
        space = client.attach(spec)
        with space.lookup(ids[:known].numpy()) as match:
            context = restore_in_place(space, match)
            assert context.tokens == known, match.reason
            new = ids[known:]
            decoder = PagedDecoder(model, spec, context, room_tokens=len(new), backend="triton")
            logits = torch.cat([decoder.extend(new[:-1]), decoder.extend(new[-1:])])
            match.check()
    np.save(target, logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
