"""Small configurations of KerasHub's text backbones: every family that is built without a download."""

import keras_hub
from zoo import Entry

models = keras_hub.models
# Deep enough for segments, long enough for activations to outweigh the tables and weights.
_SIZE = {"vocabulary_size": 64, "num_layers": 6, "hidden_dim": 32, "intermediate_dim": 64}
_HEADS = {**_SIZE, "num_heads": 4}
_GROUPED = {**_SIZE, "num_query_heads": 4, "num_key_value_heads": 2}
_WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 8}
_PAIR = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "num_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }.items()
}
_LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _smol():
    return models.SmolLM3Backbone(
        vocabulary_size=64,
        hidden_dim=32,
        intermediate_dim=64,
        num_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, True, False] * 2,
        layer_types=["full_attention"] * 6,
        mlp_bias=False,
        layer_norm_epsilon=1e-6,
        max_position_embeddings=64,
        rope_theta=10000.0,
        partial_rotary_factor=1.0,
    )


def _gemma3n():
    return models.Gemma3nBackbone(
        text_vocab_size=64,
        text_hidden_size=32,
        num_hidden_layers=4,
        pad_token_id=0,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=[64] * 4,
        hidden_activation="gelu_approximate",
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        rope_theta=10000.0,
        max_position_embeddings=64,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
    )


_BUILDERS = {
    "Albert": (models.AlbertBackbone, {**_HEADS, "embedding_dim": 16, "dropout": 0.1}),
    "Bart": (models.BartBackbone, {**_HEADS, "num_layers": 3}),
    "Bert": (models.BertBackbone, _HEADS),
    "Bloom": (models.BloomBackbone, {**_HEADS, "dropout": 0.1}),
    "DebertaV3": (models.DebertaV3Backbone, {**_HEADS, "bucket_size": 8}),
    "DistilBert": (models.DistilBertBackbone, _HEADS),
    "ESM2": (models.ESM2Backbone, _HEADS),
    "EdRec": (
        models.EdRecBackbone,
        {
            "vocab_size": 64,
            "num_layers_enc": 3,
            "num_layers_dec": 3,
            "hidden_dim": 32,
            "intermediate_dim": 64,
            "num_heads": 4,
            "dropout": 0.1,
        },
    ),
    "Electra": (
        models.ElectraBackbone,
        {
            "vocab_size": 64,
            "num_layers": 6,
            "num_heads": 4,
            "hidden_dim": 32,
            "embedding_dim": 16,
            "intermediate_dim": 64,
        },
    ),
    "FNet": (models.FNetBackbone, _SIZE),
    "Falcon": (models.FalconBackbone, {**_SIZE, "num_attention_heads": 4, "attention_dropout_rate": 0.1}),
    "GPT2": (models.GPT2Backbone, _HEADS),
    "GPTNeoX": (models.GPTNeoXBackbone, {**_HEADS, "dropout": 0.1}),
    "Gemma": (models.GemmaBackbone, {**_GROUPED, "head_dim": 8, "attention_logit_soft_cap": 50.0, **_WINDOW}),
    "Gemma3": (models.Gemma3Backbone, {**_GROUPED, "head_dim": 8, "image_size": None, "vision_encoder": None, **_WINDOW}),
    "Gemma3n": (_gemma3n, {}),
    "Gemma4": (models.Gemma4Backbone, {**_GROUPED, "head_dim": 8, "image_size": None, "sliding_window_size": 8}),
    "GptOss": (models.GptOssBackbone, {**_GROUPED, "num_experts": 4, "sliding_window": 8}),
    "Llama": (models.LlamaBackbone, _GROUPED),
    "Llama3": (models.Llama3Backbone, _GROUPED),
    "Mistral": (models.MistralBackbone, {**_GROUPED, "sliding_window": 8}),
    "Mixtral": (
        models.MixtralBackbone,
        {**_GROUPED, "num_experts": 4},
    ),  # in KerasHub 0.32 `router_jitter_noise` fails
    "OPT": (models.OPTBackbone, _HEADS),
    "Phi3": (models.Phi3Backbone, {**_GROUPED, "dropout": 0.1}),
    "Qwen": (models.QwenBackbone, {**_GROUPED, **_WINDOW}),
    "Qwen3": (models.Qwen3Backbone, {**_GROUPED, "head_dim": 8}),
    "Qwen3Moe": (models.Qwen3MoeBackbone, {**_GROUPED, "moe_intermediate_dim": 32, "num_experts": 4, "top_k": 2}),
    "Qwen3_5": (models.Qwen3_5Backbone, {**_GROUPED, "head_dim": 8, **_LINEAR}),
    "Qwen3_5Moe": (
        models.Qwen3_5MoeBackbone,
        {
            **{key: value for key, value in _GROUPED.items() if key != "intermediate_dim"},
            "head_dim": 8,
            "moe_intermediate_dim": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "top_k": 2,
            **_LINEAR,
        },
    ),
    "QwenMoe": (
        models.QwenMoeBackbone,
        {**_GROUPED, "moe_intermediate_dim": 32, "shared_expert_intermediate_dim": 32, "num_experts": 4, "top_k": 2},
    ),
    "RWKV7": (
        models.RWKV7Backbone,
        {
            "hidden_size": 32,
            "head_size": 8,
            "num_layers": 3,
            "vocabulary_size": 64,
            "intermediate_dim": 64,
            "gate_lora": 8,
            "mv_lora": 8,
            "aaa_lora": 8,
            "decay_lora": 8,
        },
    ),
    "Roberta": (models.RobertaBackbone, _HEADS),
    "RoformerV2": (models.RoformerV2Backbone, {**_HEADS, "head_size": 8}),
    "SmolLM3": (_smol, {}),
    "T5": (models.T5Backbone, {**_HEADS, "num_layers": 3, "dropout": 0.1}),
    "T5Gemma": (models.T5GemmaBackbone, {"vocabulary_size": 64, **_PAIR, "dropout_rate": 0.1, "sliding_window": 8}),
    "T5Gemma2": (models.T5Gemma2Backbone, {"vocabulary_size": 64, **_PAIR, "sliding_window": 8, "eoi_token_index": 63}),
    "XLMRoberta": (models.XLMRobertaBackbone, _HEADS),
    "XLNet": (models.XLNetBackbone, {**_HEADS, "dropout": 0.1}),
}


def _entry(name):
    kind, options = _BUILDERS[name]
    return Entry(f"{name}Backbone", "KerasHub, text", lambda: kind(**options), batch=16)


TEXT = {f"{name}Backbone": _entry(name) for name in _BUILDERS}
