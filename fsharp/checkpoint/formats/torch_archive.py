"""Archives as ``torch.save`` writes them, of plain values and tensors. Nothing is run, and nothing is larger than the archive.

``torch.load(weights_only=True)`` runs nothing either, but it believes what an archive declares: an array of a terabyte, or a
storage that is longer than its bytes. So the zip file and the few names in its pickle are read here.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch


def load_archive(data: bytes | bytearray) -> Any:
    """Return what ``torch.save`` was given: numbers, texts, booleans and tensors, in dicts, lists and tuples.

    Args:
        data: the whole archive.

    Raises:
        ValueError: compressed records, records that overlap, a tensor beyond its bytes, or a name of anything else.
        Exception: of any kind, as bytes of a pickle may say anything.

    Memory: twice the size of ``data``.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its records are compressed, which torch.save does not do")
        if sum(record.file_size for record in records) > len(data):
            raise ValueError("its records overlap")
        (name,) = [record.filename for record in records if record.filename.endswith("/data.pkl")]
        return _Unpickler(archive, name.removesuffix("data.pkl")).load()


class _Unpickler(pickle.Unpickler):
    """One that makes tensors of an archive's records, and knows few names besides."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")))
        self._archive, self._folder = archive, folder
        self._read: dict[str, bytearray] = {}

    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler."""
        found = _KNOWN.get((module, name))
        if found is None and module in ("torch", "torch.storage") and name.endswith("Storage"):
            found = _dtype_of(name)
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise ValueError(f"it asks for {module}.{name}, expected tensors, numbers, texts and booleans")
        return found

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """See pickle.Unpickler: all elements of a record, as its storage has them."""
        _, dtype, key, _, _ = pid
        if key not in self._read:
            self._read[key] = bytearray(self._archive.read(f"{self._folder}data/{key}"))
        data = self._read[key]
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def _dtype_of(name: str) -> torch.dtype | None:
    kind = getattr(torch, name, None)
    return torch.uint8 if name == "UntypedStorage" else getattr(kind, "dtype", None)


def _tensor(elements: torch.Tensor, first: int, shape: Sequence[int], strides: Sequence[int], *rest: Any) -> torch.Tensor:
    """In the place of ``torch._utils._rebuild_tensor_v2``, and of ``_v3``, which names the dtype of untyped bytes."""
    _, _, *more = rest  # requires_grad and hooks
    dtype, *metadata = more if more and isinstance(more[0], torch.dtype) else (None, *more)
    if any(metadata):
        raise ValueError(f"a tensor with {metadata[0]!r:.80}, expected plain elements")
    elements = elements if dtype is None else elements.view(dtype)
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numel: int = math.prod(shape)
    if min(first, *shape, *strides, 0) < 0 or (numel and last >= elements.numel()):
        raise ValueError(f"a tensor of shape {list(shape)!r:.80} is longer than its bytes")
    return elements.as_strided(tuple(shape), tuple(strides), first) if numel else elements.new_empty(tuple(shape))


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
}
