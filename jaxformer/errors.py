"""The one error that users are meant to see."""


class UserError(Exception):
    """Something the user can mend, said in one sentence: the value, the limit and the remedy.

    The command line prints the sentence and exits with status 2; from Python it is an ordinary exception.
    """
