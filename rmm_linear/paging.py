"""Pagers move tensors out of the memory in which they were made, to the host's or to a file, and back."""

import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rmm_linear.errors import PagingError


class Pager(Protocol):
    """Keeps tensors elsewhere, each until it is taken."""

    def put(self, tensors: Sequence[Tensor]) -> Any:
        """Copy tensors out, and return a handle for `take`."""

    def take(self, kept: Any) -> list[Tensor]:
        """Bring tensors back to the devices on which they were."""

    def close(self) -> None:
        """Free the copies that are left."""


class HostPager:
    """Keeps the tensors of an accelerator in the host's memory, pinned where that can be done.

    Copies are in the order of the device's stream: nothing waits for them, and nothing overlaps them.
    """

    def put(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, torch.device]]:
        kept = []
        for tensor in tensors:
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            kept.append((on_host.copy_(tensor, non_blocking=True), tensor.device))
        return kept

    def take(self, kept: list[tuple[Tensor, torch.device]]) -> list[Tensor]:
        return [on_host.to(device, non_blocking=True) for on_host, device in kept]

    def close(self) -> None:
        """Nothing is left: the tensors are the caller's."""


class FilePager:
    """Keeps tensors in a file without a name, which is gone with the process.

    Args:
        folder: The folder of the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise PagingError(f"{folder} takes no file: {error}; name another folder") from error
        weakref.finalize(self, self._file.close)

    def put(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor, torch.device]]:
        kept = []
        for tensor in tensors:
            kept.append((self._file.seek(0, 2), torch.empty_like(tensor, device="meta"), tensor.device))
            memory = _bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu())
            try:
                self._file.write(memory.numpy().data)
            except OSError as error:
                raise PagingError(
                    f"{memory.numel()} bytes can't be written to {self._folder}: {error}; name another folder, or allow"
                    " more memory"
                ) from error
        return kept

    def take(self, kept: list[tuple[int, Tensor, torch.device]]) -> list[Tensor]:
        found = []
        for place, like, device in kept:
            tensor = torch.empty_like(like, device="cpu")
            memory = _bytes_of(tensor)
            self._file.seek(place)
            if self._file.readinto(memory.numpy().data) < memory.numel():
                raise PagingError(f"a file in {self._folder} has lost what was written to it: run the step again")
            found.append(tensor.to(device))
        return found

    def close(self) -> None:
        self._file.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, in the layout that `torch.empty_like` gives it."""
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    own = tensor if is_dense else torch.empty_like(tensor).copy_(tensor)
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)


def pager_for(page_to: str | Path | None, device: torch.device) -> Pager:
    """Return a pager.

    Args:
        page_to: "host", or a folder.
        device: Where the tensors are.

    Raises:
        ValueError: If the host's memory is asked for of tensors that are in it, or there is no such folder.
    """
    if page_to is None:
        raise ValueError('tensors are paged, and page_to=None says not where to: pass "host", or a folder')
    if page_to == "host":
        if device.type == "cpu":
            raise ValueError('page_to="host": the tensors are in the host\'s memory already; pass a folder')
        return HostPager()
    folder = Path(page_to)
    if not folder.is_dir():
        raise ValueError(f'page_to={str(page_to)!r} is neither "host" nor a folder that exists')
    return FilePager(folder)
