"""Which rows a sketch keeps: uniform draws, and draws by integer weights."""
