"""MaxReduceGroup: a process group for other libraries' code that takes maxima over the ranks of a layout."""

from itertools import count
from typing import Any, cast

import torch

from fsharp.errors import OptionError
from fsharp.functional.formats.format import AgreeMax

_group_numbers = count()


class MaxReduceGroup(torch.distributed.ProcessGroup):
    """A process group of one rank, whose all-reduce calls ``agree``, a maximum over the ranks of a layout.

    Inside of ``with group:``, torch's functional collectives find the group by its name.
    """

    def __init__(self, agree: AgreeMax) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._agree, self._name = agree, cast(Any, f"fsharp agreement {next(_group_numbers)}")
        self._set_group_name(self._name)

    def __enter__(self) -> "MaxReduceGroup":
        torch._C._distributed_c10d._register_process_group(self._name, self)
        return self

    def __exit__(self, *error: object) -> None:
        torch._C._distributed_c10d._unregister_process_group(self._name)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name under which torch's functional collectives find the group."""
        return str(self._name)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """Replace each number in ``tensors`` by its maximum over ranks. OptionError if ``options`` has another reduction."""
        if options is not None and options.reduceOp != torch.distributed.ReduceOp.MAX:
            raise OptionError("a reduction over ranks that is not MAX: scales of whole leaves are agreed on by maxima alone.")
        for tensor in tensors:
            self._agree(tensor)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)  # type: ignore[attr-defined]
