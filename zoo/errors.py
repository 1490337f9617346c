"""The errors a user of the zoo can meet; the command line prints each as one line."""


class ZooError(Exception):
    """A mistake that its user can mend: the message names the argument, the value, the rule and the next step."""


class Kpnn2Error(ZooError):
    """A packed attention layer or its graph was given something it must refuse."""


class CheckpointMismatchError(Kpnn2Error):
    """A checkpoint was made for other data (vocabulary, classes, graph) or another network than the one at hand."""
