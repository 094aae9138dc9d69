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


FORMS: tuple[tuple[str, str], ...] = (
    (
        "What is the capital of {}?",
        "Portugal,Greece,Norway,Poland,Canada,Russia,China,India,Brazil,Kenya,Cuba",
    ),
    (
        "What is the opposite of {}?",
        "cold,fast,day,open,old,happy,full,early,hard,near,rich,strong,dark,quiet",
    ),
    (
        "What is {}?",
        "a cat,a tree,a river,music,love,gravity,time,a planet,the moon,a friend,money,bread,art",
    ),
    ("What is {}?", "the weather like,your favourite food,your favourite colour,my name,the meaning of life"),
    (
        "What is {}?",
        "five plus five,one plus one,nine minus three,two times four,half of eight,seven plus two",
    ),
    ("What is {} made of?", "bread,glass,paper,cheese,wine,steel,a book,a chair,the moon,chocolate"),
    ("What does {} mean?", "happy,brave,a smile,bonjour,gracias,freedom,quick,lonely,honest,gentle"),
    ("What do {} eat?", "lions,rabbits,birds,bears,horses,whales,spiders,ants,pandas,monkeys"),
    ("Where do {} live?", "lions,bears,camels,whales,kangaroos,tigers,frogs,owls,polar bears,people"),
    ("Who was {}?", "Mozart,Newton,Shakespeare,Napoleon,Cleopatra,Marie Curie,Darwin,Plato,Gandhi,Columbus"),
    ("Who invented the {}?", "telephone,light bulb,car,airplane,computer,radio,printing press,steam engine"),
    ("How many {}?", "legs has a spider,hours are in a day,minutes are in an hour,players are in a team"),
    (
        "How do I {}?",
        "make tea,boil an egg,learn English,sleep better,say no,save money,make a friend,stay calm",
    ),
    ("How do you say {} in Spanish?", "hello,goodbye,thank you,water,house,friend,good night,yes,please"),
    ("Why {}?", "is the sea salty,do cats purr,do birds sing,is the grass green,do we dream,does it rain"),
    ("Why {}?", "is exercise good,do people laugh,do stars shine,is fire hot,do we cry,is water important"),
    ("Can you {}?", "sing,dance,cook,speak French,write a poem,tell me the time,hear me,think,swim,drive"),
    ("Do you like {}?", "cats,football,rain,pizza,winter,films,the sea,coffee,games,flowers,dogs,school"),
    ("Is {}?", "the earth round,a tomato a fruit,a whale a fish,glass a liquid,the moon a planet,gold heavy"),
    ("Is {}?", "it going to rain,sugar bad for me,chess hard,milk healthy,this right,it late,today Monday"),
    ("Name a {}.", "vegetable,bird,flower,sport,country,river,tool,drink,fish,metal,planet,job,tree,month"),
    ("Name two {}.", "flowers,colours,sports,birds,books,cities,rivers,drinks,vegetables,instruments"),
    ("Write one sentence about {}.", "dogs,rain,summer,music,trees,books,the moon,friends,bread,time,school"),
    (
        "Write a {}.",
        "short poem,haiku,greeting,riddle,short letter,title for a story,sentence with three words",
    ),
    (
        "Tell me about {}.",
        "yourself,the moon,dogs,Paris,the sun,history,rain,books,Africa,bees,tea,chess,Rome",
    ),
    ("Tell me {}.", "a secret,a fact,a riddle,the time,a story about a dog,something about birds,good night"),
    ("Give me {}.", "an example,a reason,advice,an idea,a synonym for happy,a recipe,a number,a tip,a quote"),
    ("Give me a word that rhymes with {}.", "dog,sun,tree,night,blue,day,star,house,rain,book"),
    ("Say {}.", "no,hello,goodbye,thank you,nothing,good night in Spanish,something funny,a prayer,sorry"),
    ("Spell the word {}.", "house,cat,water,green,friend,school,apple,book"),
    ("Count to {}.", "three,ten,four,seven"),
    ('Translate "{}" into French.', "cat,house,good morning,water,friend,I am hungry,the sun"),
    (
        "Finish the sentence: {}",
        "I like,The cat is,My house is,The best day,She went to,Once upon a time,If I",
    ),
    ("Explain {}.", "rain,gravity,love,electricity,the seasons,how a clock works,money,sleep,photosynthesis"),
    ("Define {}.", "friendship,energy,a noun,courage,history,science,happiness,a verb,peace,culture"),
    ("I am {}.", "hungry,bored,sad,cold,a teacher,from Spain,ten years old,in love,late,sick,new here,lost"),
    (
        "I {}.",
        "love you,hate Mondays,want to learn,need help,have a dog,have a question,agree,do not know",
    ),
    (
        "My {}.",
        "name is Tom,dog is called Max,favourite colour is blue,head hurts,car is broken,friend is sad",
    ),
    (
        "{}",
        "Yes.,No.,Maybe.,Okay.,Sure.,Why?,Really?,What?,Sorry.,Please.,Good.,Stop.,Wow!,Nice!,Help!,Next.",
    ),
    (
        "{}",
        "Thanks a lot.,Many thanks!,Good night.,Well done.,Never mind.,Go on.,That is wrong.,I see.,Not bad.",
    ),
    (
        "{}",
        "How are you today?,What is new?,Are you there?,Are you a robot?,How old are you?",
    ),
    (
        "{}",
        "Let us begin.,Let us stop here.,That is all for now.,Talk to you later.,Have a nice day!,Take care.",
    ),
    ("What should I {}?", "cook tonight,read,do today,wear,learn first,buy for my mother,drink,say,watch"),
    (
        "Which {}?",
        "month comes after May,season is the coldest,planet is red,animal says meow,metal is liquid",
    ),
    ("Which {} do you like?", "colour,book,city,music,animal,season,sport,film,food,language"),
    (
        "When {}?",
        "is Christmas,does the sun rise,was the first world war,do birds fly south,does spring begin",
    ),
)


def questions() -> list[str]:
    """What is written out, then what is made of forms; each once."""
    made = [form.format(word) for form, words in FORMS for word in words.split(",")]
    return list(dict.fromkeys([*WORDS.splitlines(), *made]))


@torch.no_grad()
def answer_all(checkpoint: Path, questions: list[str]) -> list[Said]:
    """Greedily, each as the first turn of a chat; without those whose answers are too long."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token  # not every checkpoint names one; nothing attends to it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval().to(device)
    said = []
    for start in range(0, len(questions), GROUP):
        group = questions[start : start + GROUP]
        chats = [[{"role": "user", "content": question}] for question in group]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_TOKENS)
        for question, row in zip(group, ids[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            if tokenizer.eos_token_id in row:
                said.append(Said(question, tokenizer.decode(row, skip_special_tokens=True)))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    asked = questions()
    said = answer_all(parser.parse_args().checkpoint, asked)
    KEPT.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(said)} of {len(asked)} kept")


if __name__ == "__main__":
    main()
