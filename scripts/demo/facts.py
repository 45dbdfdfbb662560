"""What users of the demo model's world tell about themselves, how they ask for it, and what is answered."""

from collections.abc import Callable
from typing import NamedTuple

from scripts.demo.words import FOODS, HOBBIES, JOBS, PET_KINDS, RELATIONS, THINGS, Values


class Fact(NamedTuple):
    """One thing to tell. `draw` gives its fields; every text is a frame over them."""

    fields: tuple[str, ...]
    draw: Callable[[Values], dict[str, str]]
    tell: tuple[str, ...]
    noted: str
    ask: tuple[str, ...]
    answer: str
    missing: str
    guess: str = ""
    again: tuple[str, ...] = ()
    """How somebody asks who has just asked for something else."""
    generic: tuple[str, ...] = ()
    """Of `ask`, what asks for all that were told where there may be several."""

    def reply(self, frame: str, values: tuple[str, ...]) -> str:
        """`frame` filled with the values as they were told."""
        return frame.format(**dict(zip(self.fields, values, strict=True)))


def _relation(values: Values) -> dict[str, str]:
    return {"who": values.rng.choice(RELATIONS), "v": values.name()}


def _thing(values: Values) -> dict[str, str]:
    secret = values.number() if values.rng.random() < 0.4 else values.word()
    return {"who": values.rng.choice(THINGS), "v": secret}


def _age(values: Values) -> str:
    is_long = values.held or values.rng.random() < 0.3
    return values.number() if is_long else str(values.rng.randrange(5, 100))


def _one(draw: Callable[[Values], str]) -> Callable[[Values], dict[str, str]]:
    return lambda values: {"v": draw(values)}


# fmt: off
FACTS: dict[str, Fact] = {
    "name": Fact(
        ("v",), _one(lambda values: values.name()),
        ("My name is {v}.", "{v} here.", "name's {v}", "I am called {v}.", "Hello, I am {v}!", "hi i'm {v}",
          "I'm {v}, nice to meet you.",
        "hey! {v} here", "i'm {v} by the way", "They call me {v}.", "this is {v} speaking", "{v} is my name.",
        "i am {v} from work",
        "Hello! I am {v} and I am new here.", "Everybody calls me {v}.", "you may call me {v}", "my name: {v}",
        "hi, {v} here!", "I am {v}.", "I'm {v}.", "Call me {v}.", "Hi, I'm {v}.", "Hello, my name is {v}.",
        "You can call me {v}.",
         "The name is {v}.", "hey, this is {v}", "Hi! My name is {v}.", "im {v}", "my names {v}", "i go by {v}",
         "People call me {v}.", "{v} here.", "You are talking to {v}."),
        "Nice to meet you, {v}!",
        ("What is my name?", "Who am I?", "who is talking to you?", "What do you call me?", "who writes to you",
          "What did I say I am called?", "whats my name again",
        "do you still know who I am?", "my name pls", "what name did i give you", "Do you remember my name?",
        "What was my name again?",
        "Tell me my name.", "What's my name?",
         "How am I called?", "whats my name", "say my name", "Do you know my name?", "can you tell me my name?",
         "And my name is?"),
        "Your name is {v}.", "your name", "Is my name {v}?",
        again=("And my name?", "what about my name?", "my name?", "and who am i?", "name?")),
    "city": Fact(
        ("v",), _one(lambda values: values.city()),
        ("I live in {v}.", "im from {v}", "i live in a town called {v}", "I come from a place called {v}.",
          "we live in {v}", "{v} is my home town.",
        "I am at home in {v}.", "i now live in {v}", "greetings from {v}", "I'm from {v}.", "My home is in {v}.",
        "I moved to {v}.", "My city is {v}.",
        "I come from {v}.", "I live near {v}.",
         "My house is in {v}."),
        "{v} is a good place to live.",
        ("Where do I live?", "what town am i from?", "where do i live now", "in which town is my home?",
          "wheres my home", "do you know my city?", "Which city do I live in?", "What is my city?",
          "Where am I from?",
        "What city do I live in?", "where is my home",
         "Do you know where I live?", "Where was I living again?", "In which city do I live?",
         "Tell me where I live."),
        "You live in {v}.", "where you live", "Do I live in {v}?",
        again=("And where do I live?", "what about my city?", "my city?", "and my home?", "and where?")),
    "colour": Fact(
        ("v",), _one(lambda values: values.colour()),
        ("My favourite colour is {v}.", "{v} is my favourite colour.", "the best colour is {v}", "i prefer {v}",
          "my colour is {v}", "My favorite color is {v}.", "The colour I like best is {v}.",
        "I love the colour {v}.",
         "I like {v} best of all colours.", "my fav color is {v}"),
        "I will remember that you like {v}.",
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like best?",
        "What colour do I like?",
         "my favourite colour?", "Do you remember my favourite colour?", "Tell me my favourite color.",
         "which color do i like"),
        "Your favourite colour is {v}.", "your favourite colour", "Is my favourite colour {v}?",
        again=("And my favourite colour?", "what about my colour?", "the colour?", "and the colour?")),
    "number": Fact(
        ("v",), _one(lambda values: values.number()),
        ("My lucky number is {v}.", "{v} is my lucky number.", "my favorite number is {v}",
          "i like the number {v}", "My favourite number is {v}.", "My number is {v}.", "Remember the number {v}.",
        "The number I like is {v}."),
        "I will remember the number {v}.",
        ("What is my lucky number?", "What is my number?", "What's my favourite number?",
        "Which number did I tell you?", "my number?",
         "Do you remember my number?", "What was the number?", "which number do i like"),
        "Your number is {v}.", "your number", "Is my number {v}?",
        again=("And my number?", "what about the number?", "the number?", "and my lucky number?")),
    "pet": Fact(
        ("kind", "v"), lambda values: {"kind": values.pick_or_invent(PET_KINDS), "v": values.pet_name()},
        ("I have a {kind} called {v}.", "My {kind} is called {v}.", "I have a {kind} named {v}.",
        "My {kind}'s name is {v}.",
         "My pet is a {kind}, its name is {v}.", "i got a {kind} named {v}", "We have a {kind}, {v}.",
         "{v} is my {kind}.", "I own a {kind} called {v}.", "my {kind} {v} is sleeping"),
        "Say hello to {v} the {kind} from me!",
        ("What is my {kind} called?", "What's the name of my {kind}?", "What is my {kind}'s name?",
         "Do you remember my {kind}?", "whats the name of my {kind}", "Do I have a {kind}?",
         "how is my {kind} called", "Tell me the name of my {kind}."),
        "You have a {kind} called {v}.", "about a {kind}",
        again=("And my {kind}?", "What about my {kind}?", "my {kind}?", "and the name of my {kind}?"),
        generic=("What is my pet called?", "Which pet do I have?", "What pet do I have?", "Tell me about my pet.",
        "Do you remember my pet?", "whats the name of my pet", "Do I have a pet?", "What are my pets called?",
        "Which pets do I have?", "what pets do i have", "Tell me about my pets.", "and my pets?",
        "what are the names of my pets?", "Name my pets.")),
    "job": Fact(
        ("v",), _one(lambda values: values.pick_or_invent(JOBS)),
        ("I work as a {v}.", "{v} is my job.", "i earn my money as a {v}", "I have been a {v} for years.",
          "I work in town as a {v}.", "I am a {v}.", "My job is {v}.", "I'm a {v} by trade.", "im a {v}"),
        "It must be interesting to work as a {v}.",
        ("What is my job?", "what kind of work do i do?", "whats my work", "what am i by trade?", "tell me my job",
          "What do I work as?", "What's my profession?", "What do I do for a living?",
        "Do you remember my job?", "my job?"),
        "You work as a {v}.", "your job", "Do I work as a {v}?",
        again=("And my job?", "what about my job?", "and my work?", "and what do i do?")),
    "food": Fact(
        ("v",), _one(lambda values: values.pick_or_invent(FOODS)),
        ("My favourite food is {v}.", "My favorite food is {v}.", "I love to eat {v}.", "i love {v}",
          "{v} is what I like to eat.", "I could eat {v} every day.", "I like eating {v} most."),
        "I hope you get {v} soon.",
        ("What is my favourite food?", "what food do i like best?", "what do i eat most?", "whats my fav food",
          "which food do i love?", "What's my favorite food?", "What do I like to eat?",
        "Which food do I like?", "What do i love to eat?"),
        "Your favourite food is {v}.", "your favourite food",
        again=("And my favourite food?", "what about food?", "and food?", "and what do i like to eat?")),
    "hobby": Fact(
        ("v",), _one(lambda values: values.pick_or_invent(HOBBIES)),
        ("My hobby is {v}.", "i do {v} for fun", "{v} is my hobby", "my favourite hobby is {v}",
          "at weekends i do {v}", "In my free time I do {v}.", "I enjoy {v}.", "I spend my weekends with {v}."),
        "I hear that {v} is fun.",
        ("What is my hobby?", "what do i do for fun?", "whats my favourite hobby", "what do i do at weekends",
          "What do I do in my free time?", "What's my hobby?", "Which hobby do I have?",
        "What do I enjoy?"),
        "Your hobby is {v}.", "your hobby",
        again=("And my hobby?", "what about my hobby?", "hobby?", "and in my free time?")),
    "age": Fact(
        ("v",), _one(_age),
        ("I am {v} years old.", "im {v}", "i am {v}", "I turned {v} last week.", "i just turned {v}",
          "I'm {v} years old.", "My age is {v}.", "im {v} years old"),
        "I will remember that you are {v}.",
        ("How old am I?", "how old did i say i am", "my age?", "how many years old am i?", "What is my age?",
          "Do you know how old I am?", "whats my age"),
        "You are {v} years old.", "how old you are",
        again=("And my age?", "what about my age?", "and how old am i?", "age?")),
    "relation": Fact(
        ("who", "v"), _relation,
        ("My {who}'s name is {v}.", "My {who} is called {v}.", "My {who} is {v}.", "I have a {who} called {v}.",
        "My {who} has the name {v}.", "I have a {who}, {v}.", "{v} is my {who}.", "My {who} {v} says hello."),
        "I will remember your {who} {v}.",
        ("What is my {who}'s name?", "Who is my {who}?", "whats my {who}s name", "my {who}s name?",
          "how is my {who} called", "what is the name of my {who}",
        "Do you know who my {who} is?", "what was my {who} called again?", "tell me my {who}'s name",
        "do i have a {who}?", "which name does my {who} have", "What is my {who} called?",
        "What's the name of my {who}?",
         "Do you remember the name of my {who}?"),
        "Your {who} is called {v}.", "the name of your {who}",
        again=("And my {who}?", "What about my {who}?", "my {who}?", "and the name of my {who}?",
          "and who is my {who}?"),
        generic=("Who is in my family?", "Tell me about my family.", "Which people did I tell you about?",
        "who do i know", "What do you know about my family?", "name my relatives", "Who did I tell you about?")),
    "thing": Fact(
        ("who", "v"), _thing,
        ("The {who} is {v}.", "My {who} is {v}.", "the {who} is {v} by the way", "Our {who} is {v}.", "{who}: {v}",
          "note that the {who} is {v}", "Remember that the {who} is {v}.", "Please remember: the {who} is {v}.",
        "{v} is the {who}.",
         "Keep in mind that the {who} is {v}."),
        "I will remember that the {who} is {v}.",
        ("What is the {who}?", "What is my {who}?", "whats my {who}", "what is our {who}?",
          "which {who} did i tell you?", "{who}?", "i forgot the {who}", "What was the {who}?",
          "Tell me the {who}.", "Do you remember the {who}?",
        "What's the {who} again?"),
        "The {who} is {v}.", "the {who}",
        again=("And the {who}?", "What about the {who}?", "the {who}?", "and what was the {who}?")),
    "word": Fact(
        ("v",), _one(lambda values: values.word()),
        ("Remember the word {v}.", "Please remember this word: {v}", "Keep the word {v} in mind.",
        "Remember {v} for me."),
        "I will remember the word {v}.",
        ("Which word should you remember?", "What was the word?", "What word did I tell you?",
        "Do you remember the word?", "What is the word?"),
        "The word is {v}.", "a word to remember",
        again=("And the word?", "what about the word?", "the word?", "and which word?")),
}
# fmt: on
