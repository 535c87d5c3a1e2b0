"""The instrument that peaks are measured with: torch's profiler, which sees each allocation and each free.

It shares no code with the simulator, and Dynamo compiles under it (under a dispatch mode it would not). The test holds
what a step returns until the end, and makes the gradient of the loss before.
"""

from torch.profiler import ProfilerActivity, profile


class MeasuredPeak:
    """Bytes that are allocated and not freed within the block: the most, and the number at its end."""

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *failure):
        self._profile.__exit__(*failure)
        events = [event for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        self.peak = self.held = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.held += event.nbytes()
            self.peak = max(self.peak, self.held)
