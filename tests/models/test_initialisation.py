import jax
import pytest

from jaxformer.inspect import attention_entropy
from tests.arrays import first_params, random_tokens, rung


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # The sources report 0.003 and 1.492 for their text and seed; uniform tokens differ a little.
        ("attention_unscaled", 0.0, 0.02),
        ("attention_scaled", 1.3, 1.7),
    ],
)
def test_attention_entropy_at_first_is_as_the_sources_report(name: str, low: float, high: float) -> None:
    config = rung(name)
    model = config.build()
    tokens_BT = random_tokens(config.vocab_size, 64, config.context_length)
    params = first_params(model, tokens_BT[0])
    ((entropy,),) = jax.device_get(attention_entropy(model, params, tokens_BT))
    assert low < entropy < high
