"""Text from the model, byte by byte."""

from collections.abc import Callable

import torch


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor], prompt: str, count: int, *, context: int, temperature: float, seed: int
) -> str:
    """``prompt`` and ``count`` bytes more; ``logits`` maps ``[1, time]`` bytes to ``[1, time, 256]``."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(count):
            scores = logits(text[:, -context:])[0, -1].float().cpu()
            if temperature:
                likely = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)
            else:
                likely = scores.argmax(0, keepdim=True)
            text = torch.cat([text, likely[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")
