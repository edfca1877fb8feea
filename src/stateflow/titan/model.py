"""``LanguageModel`` as torchtitan's Trainer expects a model."""

from __future__ import annotations

from torch import Tensor

from stateflow.chunks import document_starts
from stateflow.documents import first_tokens_of_columns
from stateflow.model import LanguageModel


class TitanModel(LanguageModel):
    def __init__(self, model_args):
        super().__init__(model_args)
        self.model_args = model_args

    def forward(self, x: Tensor, attention_masks=None, state=None, *, document_ids=None, cu_seqlens=None):
        """``LanguageModel.forward``.  Without a pipeline the Trainer also hands over the batch's document columns,
        which ``get_attention_masks`` has turned into ``attention_masks`` already."""
        return super().forward(x, attention_masks=attention_masks, state=state)

    def get_attention_masks(self, input_batch: Tensor, tokenizer, extra_inputs=None) -> Tensor:
        """Start of each token's document, int64 [B, T]; every pipeline rank derives it from the batch that it reads.

        The columns ``document_ids`` [B, T] or ``cu_seqlens`` [B, K] of the batch decide if there is one.  Else a
        document starts at each beginning-of-sequence token and after each end-of-sequence token.

        Raises ValueError for columns that do not fit the batch, and TypeError where sequences are not to be reset,
        which is how torchtitan's Validator learns that there are no masks.
        """
        if self.model_args.attn_type != "varlen":
            raise TypeError("reset_at_documents is off: no document boundaries")
        first = first_tokens_of_columns(extra_inputs or {}, *input_batch.shape)
        if first is None:
            bos, eos = getattr(tokenizer, "bos_id", None), getattr(tokenizer, "eos_id", None)
            first = input_batch.new_zeros(input_batch.shape, dtype=bool)
            if bos is not None:
                first |= input_batch == bos
            if eos is not None:
                first[:, 1:] |= input_batch[:, :-1] == eos
        return document_starts(first.to(input_batch.device))
