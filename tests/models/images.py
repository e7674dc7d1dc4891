"""A model that takes images, with random weights, its processor and a tokenizer of numbers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from models.architectures import GQA, IMAGE, SPECIAL, Architecture
from small_models import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

SIDE, PATCH, MERGED = 112, 14, 2
NAMES = {"<image>": IMAGE, "<fake_token_around_image>": 98, "<global-img>": 97, "<end_of_utterance>": 96}
"""Tokens that the processor puts around those of an image; the prompts of the zoo have no ids below 100."""


class WithImages(Architecture):
    """Of two towers, which transformers has no class for by the configuration alone."""

    def save(self, folder: Path) -> Path:
        torch.manual_seed(0)
        transformers.Idefics3ForConditionalGeneration(self.config()).save_pretrained(folder)
        words = {str(number): number for number in range(VOCABULARY) if number not in NAMES.values()} | NAMES
        tokens = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")),
            unk_token="0",
            bos_token="1",
            eos_token="2",
            pad_token="3",
            additional_special_tokens=list(NAMES),
        )
        size = {"longest_edge": SIDE}
        images = transformers.Idefics3ImageProcessorPil(
            size=size, max_image_size=size, do_image_splitting=False
        )
        merged = (SIDE // PATCH // MERGED) ** 2
        transformers.Idefics3Processor(images, tokens, image_seq_len=merged).save_pretrained(folder)
        return folder


IDEFICS3 = WithImages(
    lambda: transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**GQA, **SPECIAL).to_dict(),
        vision_config=transformers.Idefics3VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
        ).to_dict(),
        image_token_id=IMAGE,
        scale_factor=MERGED,
        pad_token_id=3,
    ),
    "an image before each prompt",
    options={"skip_tokenizer_init": False},
    image=SIDE,
)
