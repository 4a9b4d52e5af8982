"""TransformerEngine's own Python code, imported and run on a machine without a GPU; README.md says what it is good for."""

from .cuda import architecture as architecture
from .loading import is_needed as is_needed, load as load
