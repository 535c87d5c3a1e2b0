"""The instrument that peaks are measured with: torch's profiler, which sees each allocation and each free.

It shares no code with the simulator, and Dynamo compiles under it (under a dispatch mode it would not). Memory that a
kernel takes and gives back before it returns is its own, and is left out: plans know nothing of it. Whoever measures
holds what a step returns until the end, and makes the gradient of the loss before.
"""

from torch.profiler import ProfilerActivity, profile

_KERNELS = ("aten::", "rmm_linear::")


class MeasuredPeak:
    """Within the block, bytes that are allocated and not freed: the most, and those that are left at its end."""

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *failure):
        self._profile.__exit__(*failure)
        self.peak = self.held = 0
        for size_bytes in _without_kernels_own(self._profile.profiler.kineto_results.experimental_event_tree()):
            self.held += size_bytes
            self.peak = max(self.peak, self.held)


def _without_kernels_own(roots):
    changes, waiting = [], [(event, None) for event in roots]
    while waiting:
        event, kernel = waiting.pop()
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, kernel))
        if kernel is None and event.name.startswith(_KERNELS):
            kernel = event.id
        waiting += ((child, kernel) for child in event.children)
    sizes, allocated = {}, {}
    for number, (_, address, size_bytes, kernel) in enumerate(sorted(changes, key=lambda change: change[0])):
        sizes[number] = size_bytes
        if size_bytes > 0:
            allocated[address] = number, kernel
            continue
        at, by = allocated.pop(address, (None, None))
        if kernel is not None and by == kernel:
            del sizes[at], sizes[number]
    return sizes.values()
