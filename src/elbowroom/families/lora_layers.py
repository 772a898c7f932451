"""Names of layers that several families put a LoRA on by default."""

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""The projections of attention over picture and text tokens together, as Diffusers names them."""
