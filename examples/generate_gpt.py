"""Generates text with a small GPT, as a chat program does: a forward for each token, and a processor of its logits.

The processor is in no module. With `--chip` the script runs on a "chip" whose float32 cumsum is wrong: the text becomes
another. `astray help experiments` has the walk from there to the call that is wrong.
"""

import argparse

import torch
from train_gpt import CONTEXT, GPT, TEXT


class TopP:
    """Leaves the likeliest tokens, as many as make up a share of `p`."""

    def __init__(self, p):
        self.p = p

    def __call__(self, logits):
        ordered, order = torch.sort(logits, descending=True, dim=-1)
        share = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(share, dim=-1) - share
        ordered = ordered.masked_fill(before > self.p, float("-inf"))
        return ordered.scatter(-1, order, ordered)


def generate(model, ids, processor, tokens):
    generator = torch.Generator().manual_seed(0)
    for _ in range(tokens):
        scores = processor(model(ids[:, -CONTEXT:])[:, -1])
        chosen = torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=-1)
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--chip", action="store_true", help="run on the chip that computes cumsum wrongly")
    options = parser.parse_args()

    if options.chip:
        import bad_chip

        bad_chip.use()
    torch.manual_seed(1234)
    letters = sorted(set(TEXT))
    model = GPT(len(letters)).eval()
    prompt = torch.tensor([[letters.index(letter) for letter in "it was "]])
    with torch.no_grad():
        ids = generate(model, prompt, TopP(0.7), options.tokens)
    print(repr("".join(letters[number] for number in ids[0].tolist())))


if __name__ == "__main__":
    main()
