"""What is done to rows of a generation job, in words. Data only."""

from __future__ import annotations

# Printed by `tinyloop generate --help` and written to run.json: what is done before and after generation.
POLICIES: dict[str, str] = {
    "prompt": "encoded as it stands: nothing is stripped, moved or normalised",
    "messages": "rendered by the model's chat template, or --chat-template, with the answer opened; no date",
    "bos": "as the model's own tokenizer does unless --add-bos or --no-add-bos; never two; none for messages",
    "empty prompt": "conditioned on --prefix-token, else BOS, else EOS",
    "token ids": "prompt_ids are taken as they are: no BOS",
    "special tokens": "one spelled out in the text is that token; none is written to the completion's text",
    "truncation": "a prompt has room for window - max_new_tokens; the rest is dropped from the left and told",
    "long prompt": "--long-prompt error: a row error instead; no room at all is always an error",
    "batch lines": "bodies of /v1/completions and /v1/chat/completions; what is not done is a row error",
    "settings": "a row's own go before those of the command line; absent and null are the same",
    "stop strings": "the text ends before the first place where any of them begins, wherever tokens end",
    "stop ids": "--stop-id and stop_ids end a completion beside EOS, which always does; none is in the text",
    "finish reason": "stop (a stop string or id), eos, length; a row that failed is in errors.jsonl",
    "greedy": "temperature 0 takes the likeliest token, the lowest id of equals, as is_greedy of score does",
    "seed": "the row's, else 53 bits of a hash of --seed and the row's id; drawn by seed and position",
    "n": "completion 0 has the row's seed, each further one 53 bits of a hash of that seed and its number",
    "log-probabilities": "natural, under the model's own distribution, before temperature and penalties",
    "tokens": "n_prompt: after truncation; n_tokens: up to the one that completed a stop, EOS included",
}
