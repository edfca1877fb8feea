"""``LanguageModel`` as torchtitan's Trainer expects a model."""

from __future__ import annotations

from torch import Tensor

from stateflow.chunks import document_starts
from stateflow.model import LanguageModel


class TitanModel(LanguageModel):
    def __init__(self, model_args):
        super().__init__(model_args)
        self.model_args = model_args

    def get_attention_masks(self, input_batch: Tensor, tokenizer, extra_inputs=None) -> Tensor:
        """Start of each token's document, int64 [B, T]; every pipeline rank derives it from the batch that it reads.

        A document starts at each beginning-of-sequence token, or after each end-of-sequence token.  Raises TypeError
        where sequences are not to be reset, which is how torchtitan's Validator learns that there are no masks.
        """
        if self.model_args.attn_type != "varlen":
            raise TypeError("reset_at_documents is off: no document boundaries")
        bos, eos = getattr(tokenizer, "bos_id", None), getattr(tokenizer, "eos_id", None)
        first = input_batch.new_zeros(input_batch.shape, dtype=bool)
        if bos is not None:
            first |= input_batch == bos
        if eos is not None:
            first[:, 1:] |= input_batch[:, :-1] == eos
        return document_starts(first)
