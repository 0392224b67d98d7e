"""Tiny pooling models for tests with vLLM, with random weights: a BERT that embeds, and one that scores pairs of texts."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

VOCABULARY = 512
LONGEST = 256  # maximum number of tokens of a prompt
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def build_bert_embedder(folder: Path) -> Path:
    return _build(folder, BertModel)


def build_bert_scorer(folder: Path) -> Path:
    return _build(folder, BertForSequenceClassification)


def _build(folder: Path, kind: type[BertModel] | type[BertForSequenceClassification]) -> Path:
    torch.manual_seed(20_26)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LONGEST,
        initializer_range=0.3,  # a wide range of weights, so that the vectors of two texts differ clearly
        num_labels=1,
        torch_dtype="float32",
    )
    kind(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", "rain falls on grey roofs"], trainer)
    ends = [(each, tokenizer.token_to_id(each)) for each in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],  # as tokenizers of BERT models have them
    )
