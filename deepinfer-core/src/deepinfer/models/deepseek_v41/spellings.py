"""Names that other programs give to the published configuration keys, so that an error can name the right one.

Read by `config.py` only. None of these is ever accepted: a configuration in another spelling usually comes with other
conventions as well.
"""

from __future__ import annotations

from types import MappingProxyType

OTHER_SPELLINGS = MappingProxyType(
    {
        "dim": "text_config.hidden_size",
        "n_layers": "text_config.num_hidden_layers",
        "n_heads": "text_config.num_attention_heads",
        "moe_inter_dim": "text_config.moe_intermediate_size",
        "rope_head_dim": "text_config.qk_rope_head_dim",
        "norm_eps": "text_config.rms_norm_eps",
        "window_size": "text_config.sliding_window",
        "max_seq_len": "text_config.max_position_embeddings",
        "n_activated_experts": "text_config.num_experts_per_tok",
        "num_experts": "text_config.n_routed_experts",
        "num_local_experts": "text_config.n_routed_experts",
        "score_func": "text_config.scoring_func",
        "route_scale": "text_config.routed_scaling_factor",
        "rope_factor": "text_config.rope_scaling.factor",
        "original_seq_len": "text_config.rope_scaling.original_max_position_embeddings",
        "rope_parameters": "text_config.rope_scaling",
        "type": "text_config.rope_scaling.rope_type",
        "engram_pad_id": "text_config.engram_pad_token_id",
        "n_mtp_layers": "text_config.num_nextn_predict_layers",
        "num_mtp_layers": "text_config.num_nextn_predict_layers",
        "dspark_n_activated_experts": "text_config.dspark_num_experts_per_tok",
        "dspark_noise_id": "text_config.dspark_noise_token_id",
        "vision_n_layers": "vision_config.num_hidden_layers",
        "vision_dim": "vision_config.hidden_size",
        "vision_n_heads": "vision_config.num_attention_heads",
        "vision_inter_dim": "vision_config.intermediate_size",
        "depth": "vision_config.num_hidden_layers",
        "torch_dtype": "dtype",
    }
)
