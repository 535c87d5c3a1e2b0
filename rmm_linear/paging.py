"""Pagers move tensors out of the memory in which they were made, to the host's or to a file, and back."""

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmm_linear.errors import PagingError


class HostPager:
    """Keeps the tensors of an accelerator in the host's memory, pinned where that can be done.

    Copies are enqueued on the device's current stream: the host does not wait, and no kernel overlaps them.
    """

    def put(self, tensors: Sequence[Tensor]) -> list[Any]:
        kept = []
        for tensor in tensors:
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            kept.append((on_host.copy_(tensor, non_blocking=True), tensor.device))
        return kept

    def take(self, kept: list[Any]) -> list[Tensor]:
        return [on_host.to(device, non_blocking=True) for on_host, device in kept]

    def close(self) -> None:
        """Do nothing: the caller owns the tensors."""


class FilePager:
    """Keeps tensors in an unnamed file, which the system deletes with the process.

    Raises:
        PagingError: If the folder takes no file; in `put` and `take`, if the disk is full, or the file has lost its
            contents.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._end = folder, 0
        with self._told("takes no file"):
            # unbuffered, so that a full disk raises in the write itself
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def put(self, tensors: Sequence[Tensor]) -> list[Any]:
        kept = []
        for tensor in tensors:
            left = _bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().data
            kept.append((self._end, torch.empty_like(tensor, device="meta"), tensor.device))
            with self._told(f"takes no {left.nbytes} bytes more"):
                self._file.seek(self._end)
                while left:
                    count = self._file.write(left)
                    self._end, left = self._end + count, left[count:]
        return kept

    def take(self, kept: list[Any]) -> list[Tensor]:
        found = []
        for place, like, device in kept:
            tensor = torch.empty_like(like, device="cpu")
            left = _bytes_of(tensor).numpy().data
            with self._told("can't be read"):
                self._file.seek(place)
                while left:
                    count = self._file.readinto(left)
                    if not count:
                        raise PagingError(f"a file in {self._folder} has lost its contents: run the step again")
                    left = left[count:]
            found.append(tensor.to(device))
        return found

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PagingError(f"page_to: {self._folder} {what}: {error}; name another folder") from error

    def close(self) -> None:
        self._file.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in the layout that `torch.empty_like` gives."""
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    own = tensor if is_dense else torch.empty_like(tensor).copy_(tensor)
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)


# `put` copies tensors out and returns a handle; `take` copies the tensors of a handle back to their devices.
Pager = HostPager | FilePager


def pager_for(page_to: str | Path | None, device: torch.device) -> Pager:
    """Return a pager to "host", or to a folder, for tensors on a device.

    Raises:
        ValueError: If `page_to` is None, "host" for tensors that are in the host's memory already, or no folder.
    """
    if page_to is None:
        raise ValueError('tensors are paged, but page_to=None names no destination: pass "host", or a folder')
    if page_to == "host":
        if device.type == "cpu":
            raise ValueError('page_to="host": the tensors are in the host\'s memory already; pass a folder')
        return HostPager()
    folder = Path(page_to).expanduser()
    if not folder.is_dir():
        raise ValueError(f'page_to={str(page_to)!r} is neither "host" nor a folder that exists')
    return FilePager(folder)
