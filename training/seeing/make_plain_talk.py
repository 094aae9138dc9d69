"""`python -m training.seeing.make_plain_talk CHECKPOINT`: writes `plain_talk.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from training.seeing.plain_talk import KEPT, Said

MOST_TOKENS = 44  # of an answer; longer ones are left out, for rows are short
GROUP = 20
WORDS = """\
Hello!
Hi there.
Good morning!
Good evening.
How are you?
Thanks!
Thank you very much.
Thank you, that is all.
Great, thanks.
That is right.
Goodbye!
See you tomorrow.
Who are you?
What is your name?
What can you do?
Can you help me?
What is the capital of France?
What is the capital of Italy?
What is the capital of Spain?
What is the capital of Germany?
What is the capital of Japan?
What is the capital of Egypt?
What is two plus two?
What is three plus four?
What is ten minus six?
How many days are in a week?
How many months are in a year?
What day comes after Monday?
What is the opposite of hot?
What is the opposite of big?
What is the opposite of up?
What colour is the sky?
What color is grass?
What color is snow?
What do cows eat?
What do bees make?
What is water made of?
What is ice?
What is a dog?
What is a poem?
What is a computer?
What is the largest ocean?
What is the largest planet?
What is the tallest mountain?
Which animal is the fastest?
Is the sun a star?
Is water wet?
Can birds fly?
Do fish sleep?
Where do penguins live?
Who wrote Hamlet?
Who painted the Mona Lisa?
Who was Albert Einstein?
When do leaves fall?
Why is the sky blue?
Why do we sleep?
Tell me a joke.
Tell me a short story.
Tell me something interesting.
Say hello in French.
Say something nice.
Say yes.
Write one sentence about the sea.
Write one sentence about cats.
Write one sentence about winter.
Give me a word that rhymes with cat.
Name a fruit.
Name a colour.
Name three animals.
Name three countries.
Name a city in Europe.
Count to five.
Spell the word tree.
Translate "dog" into Spanish.
Finish the sentence: The sun is
What should I eat for breakfast?
I am tired.
I am happy today.
I like music.
My name is Anna.
I do not understand.
Let us talk about something else.
Do you like music?
Do you like books?
"""


@torch.no_grad()
def answer_all(checkpoint: Path, questions: list[str]) -> list[Said]:
    """Greedily, each as the first turn of a chat; without those whose answers are too long."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    said = []
    for start in range(0, len(questions), GROUP):
        group = questions[start : start + GROUP]
        chats = [[{"role": "user", "content": question}] for question in group]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_TOKENS)
        for question, row in zip(group, ids[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            if tokenizer.eos_token_id in row:
                said.append(Said(question, tokenizer.decode(row, skip_special_tokens=True)))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    said = answer_all(parser.parse_args().checkpoint, WORDS.splitlines())
    KEPT.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(said)} of {len(WORDS.splitlines())} kept")


if __name__ == "__main__":
    main()
