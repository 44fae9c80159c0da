"""What a prompt must be, whoever brings it: checked before a model is loaded, and at submission."""

from engine.errors import RequestError, TooLong


def check_prompt(ids, context, vocab):
    """RequestError where no engine of this model could take the ids (any sequence of integers).

    context: tokens of a conversation, prompt and reply. vocab: size of the vocabulary.
    """
    if len(ids) == 0:
        raise RequestError("the prompt is empty", "give at least one token")
    if len(ids) >= context:
        raise TooLong(f"the prompt has {len(ids)} tokens; the context holds {context}, one of "
                      f"them for the reply", f"shorten the prompt to {context - 1} tokens or "
                      "raise --context, up to the model's window")
    if min(ids) < 0 or max(ids) >= vocab:
        i, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab)
        raise RequestError(f"token {str(token)[:24]} at position {i} is not in the vocabulary of "
                           f"{vocab}", f"ids are 0 to {vocab - 1}: use this model's tokenizer")
