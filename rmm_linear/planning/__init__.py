"""Plans of a step: graphs, schedules, the simulator, the search, and published planners."""
