"""Tiny random models of families that hear, with the processors that the hub has for them."""

from __future__ import annotations

from pathlib import Path

from tests.sounds import RATE
from tests.train.vision_families import Family, make_model

WINDOW_S = 2
"""Seconds that a tower takes at a time; 30 in models of the hub."""
_MELS = 16
_READER = {"feature_size": _MELS, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400}
_WHISPER = ("WhisperFeatureExtractor", {**_READER, "chunk_length": WINDOW_S})
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_CODER = {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
_AUDIO_IDS = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
FAMILIES: dict[str, Family] = {
    "qwen2_audio": Family(
        mark="<|audio_bos|><|AUDIO|><|audio_eos|>\n",
        reader=_WHISPER,
        ids={"audio_token_index": "<|AUDIO|>"},
        others=("<|audio_bos|>", "<|audio_eos|>"),
        processor={"processor_class": "Qwen2AudioProcessor"},
        tower={"model_type": "qwen2_audio_encoder", **_CODER, "num_mel_bins": _MELS, "max_source_positions": 100},
        kind="audio",
        text={"model_type": "qwen2"},
    ),
    "audioflamingo3": Family(
        mark="<sound>",
        reader=_WHISPER,
        ids={"audio_token_id": "<sound>"},
        processor={"processor_class": "AudioFlamingo3Processor", "max_audio_len": 4},
        tower={"model_type": "audioflamingo3_encoder", **_SIZES, "num_mel_bins": _MELS, "max_source_positions": 100},
        kind="audio",
        text={"model_type": "qwen2"},
    ),
    "musicflamingo": Family(
        mark="<sound>",
        reader=_WHISPER,
        ids={"audio_token_id": "<sound>"},
        others=("<|sound_bos|>", "<|sound_eos|>"),
        processor={"processor_class": "MusicFlamingoProcessor", "max_audio_len": 4},
        tower={"model_type": "audioflamingo3_encoder", **_SIZES, "num_mel_bins": _MELS, "max_source_positions": 100},
        kind="audio",
        text={"model_type": "qwen2"},
    ),
    "glmasr": Family(
        mark="<|begin_of_audio|><|pad|><|end_of_audio|>",
        reader=_WHISPER,
        ids={"audio_token_id": "<|pad|>"},
        others=("<|begin_of_audio|>", "<|end_of_audio|>"),
        processor={"processor_class": "GlmAsrProcessor", "max_audio_len": 4},
        tower={"model_type": "glmasr_encoder", **_SIZES, "intermediate_size": 128, "num_mel_bins": _MELS},
        kind="audio",
        text={"model_type": "llama"},
    ),
    "qwen3_asr": Family(
        mark="<|audio_start|><|audio_pad|><|audio_end|>",
        reader=("Qwen3ASRFeatureExtractor", _READER),
        ids={"audio_token_id": "<|audio_pad|>"},
        names=_AUDIO_IDS,
        processor={"processor_class": "Qwen3ASRProcessor"},
        tower={
            "model_type": "qwen3_asr_encoder",
            **_CODER,
            "num_mel_bins": _MELS,
            "output_dim": 64,
            "downsample_hidden_size": 8,
        },
        kind="audio",
        text={"model_type": "qwen3"},
    ),
}
"""`model_type` → family."""


def make_family(name: str, folder: Path) -> Path:
    """Writes a model of a family, its tokenizer and its processor."""
    return make_model(name, FAMILIES[name], folder)
