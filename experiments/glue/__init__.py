"""Fine-tune Transformers on GLUE with exact, checkpointed and sketched linear layers, one result file a run."""
