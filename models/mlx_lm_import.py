"""The names of mlx-lm that the project uses outside `cache`, imported without side effects (see `cache.layers`)."""

from cache.layers import set_wired_limit

# isort: split
from mlx_lm.models import cache as cache_classes
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.base import quantized_scaled_dot_product_attention as quantized_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import (
    MODEL_REMAPPING,
    get_total_parameters,
    infer_quant_config,
    load_model,
    load_tokenizer,
    quantize_model,
    save,
)
from mlx_lm.utils import _get_classes as get_classes
