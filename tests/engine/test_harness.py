"""The reference itself: the plain server repeats itself, streaming or not, alone or in a batch."""

import random
from concurrent.futures import ThreadPoolExecutor

from harness import script


def test_the_reference_repeats_itself(plain, oracle):
    rnd = random.Random(0)
    prompts = [script.ids(rnd, rnd.randrange(100, 900)) for _ in range(8)]
    first = [plain.generate(p, n=12).tokens for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda p: plain.stream(p, n=12).tokens, prompts))
    for prompt, got, want in zip(prompts, again, first, strict=True):
        oracle.tokens(prompt, got, want, "repeated")


def test_the_chat_template_is_there(plain):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    answer = plain.http.post("/v1/chat/completions", body).json
    assert answer["usage"]["prompt_tokens"] == 24  # one token per byte, and per special token
