"""Files whose reads are counted."""

from fsharp.checkpoint.reading import Reader
from fsharp.checkpoint.storage import LocalStorage


class CountingFiles(LocalStorage):
    """Files, and how many bytes were read of them."""

    def __init__(self):
        self.num_read = 0

    def read(self, path, start, into):
        self.num_read += len(into)
        super().read(path, start, into)


def counted_reader(found):
    """A reader of a checkpoint, and the files that it reads."""
    reader = Reader(found.folder, found.manifest)
    reader._storage = CountingFiles()
    return reader, reader._storage
