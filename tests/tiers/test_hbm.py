"""The HBM tier beyond the contract: batches, failures, sharing; on a driver without a GPU."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from fake_cuda import fake_driver, library

from kvstore.core.block import place_offset
from kvstore.core.errors import TierError
from kvstore.cuda.device import Device, Shared
from kvstore.cuda.driver import CudaError, CudaUnavailable, Driver
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.hbm.lane import batches

SIZE = 70_000
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "support")}


def payload_of(i: int, length: int = SIZE) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, length, dtype=np.uint8)


@pytest.fixture
def device() -> Device:
    return Device(driver=fake_driver())


@pytest.fixture
def tier(device: Device) -> Iterator[HbmTier]:
    made = HbmTier(device, {"": 8 << 20}, buffer_bytes=100_000)
    yield made
    made.close()


def pinned(length: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)


@pytest.mark.parametrize("lengths", [[], [5], [99, 1], [100], [101, 250, 0, 3], [1000, 7]])
def test_batches_cover_every_byte_in_order(lengths: list[int]) -> None:
    """Pieces follow each other without a gap, and no batch is larger than its buffer."""
    whole = [piece for batch in batches(lengths, 100) for piece in batch]
    covered = [(p.item, p.start + i) for p in whole for i in range(p.length)]
    assert covered == [(item, i) for item, length in enumerate(lengths) for i in range(length)]
    sizes = [sum(piece.length for piece in batch) for batch in batches(lengths, 100)]
    assert all(size == 100 for size in sizes[:-1])
    assert all(0 < size <= 100 for size in sizes)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_many_blocks_go_and_come(
    tier: HbmTier, monkeypatch: pytest.MonkeyPatch, lazy: bool, stable: bool, old: bool
) -> None:
    """Blocks promoted together are right, whether the driver batches copies or not, and hashed."""
    if lazy:
        monkeypatch.setenv("FAKE_CUDA_LAZY", "1")
    if old:
        monkeypatch.setenv("FAKE_CUDA_OLD", "1")
    memory = pinned(24 * 4096 * 18)
    if stable:
        tier.use_stable_memory(memory)
    places = tier.reserve(SIZE, 16, 24)
    sources = [memory[i * 73_728 :][:SIZE] for i in range(24)]
    for i, source in enumerate(sources):
        source[:] = payload_of(i)
    wanted = [xxhash.xxh3_128_digest(source.tobytes()) for source in sources]
    assert tier.write_many(list(zip(places, sources, strict=True))) == wanted
    targets = [np.zeros(SIZE + 7, np.uint8) for _ in places]
    assert tier.read_many(list(zip(places, targets, strict=True)), SIZE) == wanted
    for i, target in enumerate(targets):
        assert np.array_equal(target[:SIZE], payload_of(i))
        assert tier.verify(places[i], SIZE, wanted[i])


def test_memory_that_lacks_is_said(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the GPU has is an error that names it and the setting."""
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(1 << 20))
    with pytest.raises(TierError, match=r"GPU-a0a0.*lower the size of tier hbm"):
        HbmTier(device, {"": 64 << 20})


def test_a_failing_gpu_is_a_problem_not_a_crash() -> None:
    """I14: with the GPU's context lost, reads fail, no slot is given, and the tier says why."""
    code = (
        "import os, numpy as np\n"
        "from fake_cuda import fake_driver\n"
        "from kvstore.core.errors import TierError\n"
        "from kvstore.cuda.device import Device\n"
        "from kvstore.tiers.hbm import HbmTier\n"
        "tier = HbmTier(Device(driver=fake_driver()), {'': 4 << 20}, buffer_bytes=65536)\n"
        "place, = tier.reserve(1000, 16, 1)\n"
        "tier.write(place, np.ones(1000, np.uint8))\n"
        "os.environ['FAKE_CUDA_FAIL'] = '1'\n"
        "try: tier.read(place, np.zeros(1000, np.uint8), 1000)\n"
        "except TierError as error: print(error)\n"
        "print(tier.problem)\n"
        "print(tier.reserve(1000, 16, 1), tier.read_many([(place, np.zeros(9, np.uint8))], 9))\n"
        "tier.probe()\n"
        "print(bool(tier.problem))\n"
        "tier.close()\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert result.returncode == 0, result.stderr
    error, problem, after, still = result.stdout.splitlines()
    assert "ILLEGAL_ADDRESS" in error
    assert error == problem
    assert after == "[] [None]"
    assert still == "True"


def test_a_session_sees_copies_of_what_it_asked_for(tier: HbmTier, device: Device) -> None:
    """Staging of a session holds the blocks it loaded, and zeros elsewhere; the arena is unseen."""
    places = tier.reserve(SIZE, 16, 3)
    tier.write_many([(place, payload_of(i)) for i, place in enumerate(places)])
    staging = tier.open_staging(1 << 20)
    staging.load([(places[2], 0), (places[0], 500_000)], SIZE).synchronize()
    shown = np.ones(1 << 20, np.uint8)
    stream = device.stream()
    stream.copy(shown.ctypes.data, staging.address, len(shown))
    stream.synchronize()
    assert np.array_equal(shown[:SIZE], payload_of(2))
    assert np.array_equal(shown[500_000 : 500_000 + SIZE], payload_of(0))
    assert not shown[SIZE:500_000].any()
    assert staging.share().length == 1 << 20
    with pytest.raises(TierError, match="outside"):
        staging.load([(places[0], (1 << 20) - 10)], SIZE)
    staging.close()


OPENS = """
import sys
import numpy as np
from fake_cuda import fake_driver
from kvstore.cuda.device import Device, Shared
device = Device(driver=fake_driver())
for line in sys.stdin:
    handle, offset, length, at, size = line.split()
    shared = Shared(bytes.fromhex(handle), int(offset), int(length))
    address, target = device.open(shared), np.zeros(int(size), np.uint8)
    stream = device.stream()
    stream.copy(target.ctypes.data, address + int(at), len(target))
    stream.synchronize()
    device.close(address, shared)
    print(target.tobytes().hex(), flush=True)
"""


def test_an_engine_reads_blocks_in_place(tier: HbmTier) -> None:
    """Another process opens the arena by its handle and finds a block at its place's offset."""
    place = tier.reserve(SIZE, 16, 2)[1]
    tier.write(place, payload_of(4))
    shared = tier.share_arena()

    line = f"{shared.handle.hex()} {shared.offset} {shared.length} {place_offset(place)} 100\n"
    result = subprocess.run(
        [sys.executable, "-c", OPENS], input=line, capture_output=True, text=True,
        env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert bytes.fromhex(result.stdout.strip()) == payload_of(4)[:100].tobytes()


def test_memory_that_cannot_be_shared_is_refused_with_the_fix(
    tier: HbmTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a virtual-memory allocator has no handle; the error says what to use."""
    monkeypatch.setenv("FAKE_CUDA_VIRTUAL", "1")
    with pytest.raises(TierError, match=r"virtual-memory allocator.*cudaMalloc"):
        tier.share_arena()


def test_handles_from_outside_are_checked(device: Device) -> None:
    """A handle of another length, or with a range beyond its allocation, is refused."""
    address = device.allocate(8192)
    shared = device.share(address + 4096, 4096)
    assert shared.offset == 4096
    with pytest.raises(ValueError, match="64 bytes"):
        device.open(Shared(b"short", 0, 1))
    with pytest.raises(CudaError):
        device.open(Shared(bytes(64), 0, 1))
    with pytest.raises(CudaError, match="beyond its allocation"):
        device.share(address + 4096, 4097)
    device.free(address)


def test_ends_of_one_gpus_objects_leave_work_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector may end an event or a stream amid a call to another GPU, which goes on."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    one, two = (Device(ordinal=i, driver=fake_driver()) for i in range(2))
    address, stream = two.allocate(4096), two.stream()
    ended = [one.stream().record(), one.stream()]
    two.enter()
    ended.clear()
    two.driver.call("cuMemsetD8Async", address, 1, 4096, stream.handle)
    stream.synchronize()
    with pytest.raises(CudaError):
        one.stream().copy(address, address + 8, 8)  # another GPU's memory, without naming it
    two.free(address)


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, no GPU and no such GPU are told apart, in a sentence."""
    with pytest.raises(CudaUnavailable, match=r"no-such-driver.so cannot be loaded"):
        Driver("no-such-driver.so")
    with pytest.raises(CudaUnavailable, match="this machine has GPU-a0a0"):
        Device(uuid="GPU-1", driver=fake_driver())
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    with pytest.raises(CudaUnavailable, match="finds no GPU"):
        Driver(str(library()))


def test_nothing_loads_early() -> None:
    """Importing the tier loads no driver, no torch and no cupy."""
    code = (
        "import sys, kvstore.tiers.hbm; "
        "print(sorted({'torch', 'cupy', 'cuda'} & set(sys.modules)), "
        "'libcuda' in open('/proc/self/maps').read())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] False"
