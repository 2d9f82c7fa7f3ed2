"""Sizes that make a configuration of the transformers library small."""

from typing import Any

# What a field is called, whatever the architecture, by its size.
SIZES: dict[Any, str] = {
    1: "n_group topk_group n_shared_experts first_k_dense_replace decoder_sparse_step n_groups "
    "mamba_n_groups num_random_blocks bos_token_id decoder_start_token_id",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_blocks num_key_value_heads type_vocab_size "
    "num_experts_per_tok moe_top_k moe_k top_k expand num_conv_pos_embedding_groups eos_token_id",
    3: "num_channels num_feat_extract_layers cls_token_id num_labels",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "time_step_rank mamba_d_conv block_size",
    6: "num_queries",
    8: "head_dim attention_head_size d_head d_kv patch_size kv_lora_rank qk_rope_head_dim "
    "qk_nope_head_dim v_head_dim rotary_dim state_size mamba_n_heads mamba_d_head mamba_d_state "
    "ssm_state_size attention_window num_buckets hidden_size_per_layer_input",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "chunk_size mamba_chunk_size num_mel_bins num_conv_pos_embeddings projection_dim "
    "sliding_window",
    32: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size attention_hidden_size "
    "image_size lru_width mask_feature_size",
    64: "hidden_dim n_inner intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner "
    "ffn_hidden_size mlp_dim",
    99: "vocab_size vocab_size_per_layer_input",
    100: "max_source_positions",
    128: "max_position_embeddings n_positions max_target_positions n_ctx",
}
TINY: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()} | {
    "block_sizes": [1, 1],
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "feat_proj_dropout": 0.0,
    "pad_token_id": 0,
    "use_pretrained_backbone": False,
    "dropout": 0.1,
}

# Where one architecture needs more than that.
ONE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "swin": {
        "embed_dim": 16,
        "depths": [1, 2],
        "num_heads": [2, 2],
        "window_size": 2,
        "patch_size": 2,
    },
    "pvt": {
        "hidden_sizes": [16, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "image_size": 64,
    },
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "conv1d_width": 4},
    "whisper": {"max_source_positions": 30, "num_mel_bins": 16},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16, "patch_size": 4},
}
