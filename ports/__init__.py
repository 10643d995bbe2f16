"""Checkpoints in and out: HF safetensors and orbax folders <-> the runtime form of the weights."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line that names folder, file and tensor."""
