"""What a language model writes, in TensorBoard."""

from collections.abc import Sequence

import lightning.pytorch as pl

from zoo.callbacks.loggers import tensorboards
from zoo.errors import ZooError
from zoo.tasks import LanguageModelTask


class TextSamples(pl.Callback):
    """Write continuations of fixed prompts to TensorBoard's text tab at each validation.

    Args:
        prompts: the texts to continue; an empty one starts a new text.
        max_new_tokens: how many tokens to add at the most.
    """

    def __init__(self, prompts: Sequence[str] = ("",), max_new_tokens: int = 100) -> None:
        self.prompts, self.max_new_tokens = list(prompts), max_new_tokens

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, LanguageModelTask):
            raise ZooError(f"TextSamples: got {type(pl_module).__name__}; it shows a LanguageModelTask's samples only")
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        for logger in tensorboards(trainer):
            network = pl_module.network
            room = self.max_new_tokens
            if network.positions == "learned":  # which end; a sample is no reason to end the run as well
                longest = max(len(pl_module.encode_prompt(prompt)) for prompt in self.prompts)
                room = max(0, min(room, network.max_len - longest))
            texts = pl_module.generate(self.prompts, max_new_tokens=room)
            for i, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
                indented = "\n".join(f"    {line}" for line in f"{prompt}{text}".splitlines())  # Markdown's verbatim
                logger.experiment.add_text(f"sample/{i}", indented, trainer.global_step)
