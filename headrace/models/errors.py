"""The error of getting a model onto this machine."""


class FetchError(RuntimeError):
    """A model could not be found or fetched: says what failed and what to do. Nothing partial is left."""
