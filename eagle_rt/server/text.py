"""Finding marks in a text that comes piece by piece."""


def length_of_begun(text: str, mark: str) -> int:
    """Length of the longest end of the text that the mark begins with."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
