"""Every error that a user can cause, one class per subject.

A message is one line: the thing, what was found, what was expected, what to do.
"""


class ColibriError(Exception):
    """Base class: whatever colibri reports to a user, without a traceback."""


class SourceError(ColibriError):
    """A checkpoint to convert is missing, cut short, or not what its header says."""


class ConfigError(ColibriError):
    """A model's configuration or a user's setting has a value that is not supported."""


class FormatError(ColibriError):
    """A model directory is incomplete, damaged, or of another format version."""


class QuantError(ColibriError):
    """A tensor cannot be stored in, or read from, the tensor type asked for."""


class TokenizerError(ColibriError):
    """A tokenizer is missing, malformed, or of an unknown kind."""


class TemplateError(ColibriError):
    """A chat template is malformed or refuses the conversation."""


class MemoryBudgetError(ColibriError):
    """The memory that may be used cannot hold what must be resident."""


class DiskSpaceError(ColibriError):
    """The drive has less free space than the result needs."""


class ExpertReadError(ColibriError):
    """An expert's bytes could not be read from its file."""


class PassCancelled(ColibriError):
    """A forward pass was given up because its caller asked for that; nothing of it counts."""


class ContextLengthError(ColibriError):
    """The prompt does not fit into the context."""

    def __init__(self, prompt_tok: int, context_length: int):
        super().__init__(f"the prompt has {prompt_tok} tokens, the context holds {context_length}: shorten it or raise the context length")
        self.prompt_tok, self.context_length = prompt_tok, context_length
