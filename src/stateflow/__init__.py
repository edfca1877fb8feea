"""StateFlow: train long-context linear-recurrent and hybrid language models by pipelining chunks of a sequence."""

__version__ = "0.1.0"
