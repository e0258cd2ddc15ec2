"""The architectures, as data. A new model is a new entry in one of the three tables and nothing else."""

from typing import Final

from hybridstate.families.gdn import GDN_FAMILIES
from hybridstate.families.kda import KDA_FAMILIES
from hybridstate.families.mamba2 import MAMBA2_FAMILIES
from hybridstate.families.spec import Family

FAMILIES: Final[tuple[Family, ...]] = (*GDN_FAMILIES, *KDA_FAMILIES, *MAMBA2_FAMILIES)

FIXED_SLOPE_MODEL_TYPES: Final = (
    "minimax",
    "minimax_text_01",
    "minimax_m1",
    "bailing_moe_linear",
    "bailing_hybrid",  # Ling-2.x; Ling-3 shares the name and has A_log
)
"""Where A_log is absent, the decay is a constant per head: there is no learned horizon to read."""

IGNORED_COMPONENTS: Final = ("mtp", "visual", "vision_tower", "vision_model", "mm_projector")
"""First or inner components of tensor names outside the text stack."""

TEXT_CONFIGS: Final = ("text_config", "llm_config")
"""Keys under which a composite model keeps the config of its text stack."""

GGUF_NAMES: Final = ("ssm_a", "ssm_a.weight")
"""Last components of a decay tensor converted for llama.cpp: -exp(A_log), value heads in another order."""
