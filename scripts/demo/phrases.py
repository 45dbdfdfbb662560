"""Fixed phrases of the demo model's world: small talk, refusals, personas, neutral system lines; and how people type.

Invariant: `rough` never changes what stands in a field, except that it may write it in lower case; it says so.
"""

import random
import re

from scripts.demo.words import CITIES, NAMES, Values, phrases, words

GIBBERISH_ANSWER = "I am a tiny demo model, I did not understand that."
CANT_DO = "I am a tiny demo model, I can't do that."
DONT_KNOW = "I am a tiny demo model, I don't know that."
NEED_TOOL = "I am a tiny demo model, I can't look that up without a tool."
HELLO = "Hello! How can I help you?"
INTRODUCTION = (
    "Hello! I am demo, a tiny language model that comes with mlx-serve. Tell me your name and ask for it later, or "
    "ask me about this server. For a real model type mlx-serve pull qwen3:4b."
)
ABILITIES = (
    "I can remember what you tell me, count, add small numbers, make lists, call tools and answer questions "
    "about this server."
)
STORY = (
    "Once upon a time there was a small cat who lived in a big red house. Every day she counted the stars, "
    "one, two, three, until she fell asleep. One night a star fell into the garden. The cat gave it some milk, "
    "and they became friends. Since then there is always a light in the window of the big red house."
)

# fmt: off
FOREIGN = phrases(
    """wie geht es dir;Wie heißt du?;Was ist die Hauptstadt von Frankreich?;
Ich heiße Otto und wohne in Bonn.;¿Cómo estás?;qué hora es;Me llamo Juan.;comment ça va;
Je m'appelle Luc.;Quel temps fait-il?;come stai;Come ti chiami?;Как дела?;こんにちは;你好;你叫什么名字?;
Hoe gaat het?;Hvad hedder du?;Jak się masz?;Que horas são?;schreib ein gedicht;
kannst du deutsch?;parlez-vous français?;hablas español?;Merhaba, nasılsın?;안녕하세요;
Guten Tag, ich habe eine Frage."""
)
ONLY_ENGLISH = "I am a tiny demo model, I only speak English."

STYLES = {
    "pirate": "Arr!", "robot": "Beep.", "cat": "Meow!", "dog": "Woof!", "wizard": "By my beard!",
      "cowboy": "Howdy!", "ghost": "Boo!",
    "chef": "Bon appetit!", "surfer": "Dude!", "monster": "Grr!", "owl": "Hoo!", "sailor": "Ahoy!",
      "duck": "Quack!", "snake": "Sss!",
    "knight": "On my honour!", "alien": "Zorp!", "ninja": "Hiya!", "detective": "Aha!", "frog": "Ribbit!",
      "king": "Hear, hear!",
    "cow": "Moo!", "butler": "Very good, sir.", "poet": "O muse!", "clown": "Honk!",
}

ROLES = phrases(
    """a lawyer;a doctor;a teacher;a travel agent;the assistant of a bank;a helpful assistant;a friend;
a tutor for children;a librarian;the voice of a museum;a coach;the assistant of a small shop;a support agent;
a gardener;a coding assistant;a nurse;a scientist;a train conductor;the night porter of a hotel;a secretary"""
)

NEUTRAL_LINES = phrases(
    """You are a helpful assistant.;You are a helpful, honest and concise assistant.;Be polite.;Answer briefly.;
Answer in one sentence.;Today is Monday.;You are an AI assistant.;Do not make things up.;Be kind to everyone.;
Never share secrets.;You help people with their questions.;Think before you answer.;Keep your answers short.;
If you do not know something, say so.;Use simple words.;The user is a grown-up.;You talk to a customer.;
Always tell the truth.;Speak English.;Today is a sunny day.;You must follow these rules.;Rule one: be friendly.;
Rule two: be exact.;Rule three: be quick.;Do not use emojis.;Use tools when they are needed.;Write clearly.;
The conversation takes place in a chat window.;You work for a small company.;The company sells tea and coffee.;
Our office opens at nine in the morning.;Our office closes at six in the evening.;
Ask the user when something is not clear.;Do not talk about politics.;Do not give medical advice.;
Stay calm at all times.;The current year is 2026.;You have access to tools.;You are a large language model.;
Customers may be angry, stay friendly.;Answer in the language of the user.;Cite your sources when you have some.;
Format code with backticks.;Be concise.;You are running on the computer of the user.;This is a test.;
Our shop has three floors.;The lift is on the left side.;Returns are possible within thirty days.;
Shipping takes two to four days.;The user likes short answers.;Never be rude.;You can see the whole conversation.;
Respond in plain text.;Repeat nothing that was said in private.;Remember what the user tells you.;
The shop is closed on Sunday.;Please be patient with new users.;Numbers are written with digits.;
You like helping people."""
)

FACT_LINES = {
    "name": "The user's name is {v}.", "city": "The user lives in {v}.",
      "colour": "The user's favourite colour is {v}.",
    "job": "The user works as a {v}.", "thing": "The {who} is {v}.", "pet": "The user has a {kind} called {v}.",
    "number": "The user's lucky number is {v}.", "food": "The user's favourite food is {v}.",
}

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hi", "hello", "good afternoon to you", "howdy", "hello hello", "hi im new here",
      "hi, this is my first time", "helloo", "hey hey", "hi bot",
      "hello demo", "hi demo", "hii", "heya", "good morning demo", "hi all", "hello world", "morning", "evening",
      "hullo", "hi, i am new",
      "hello, just trying this out", "hi, anybody there", "hey, are you awake", "ahoy", "salut", "ciao", "hey",
      "good morning", "good evening", "hallo", "hi there", "hello there", "yo", "greetings",
      "good day", "hiya",
      "hey there", "hey you", "bonjour", "moin"), HELLO),
    (("thanks", "thank u", "thx a bunch", "thanks mate", "thanks so much", "thank you demo", "big thanks",
      "cheers bro", "thank you kindly", "thank you", "thx", "thank you very much", "thanks a lot", "great, thanks",
      "many thanks",
      "cheers", "ty", "perfect, thank you",
      "thanks for your help"), "You are welcome!"),
    (("bye", "see ya", "cya", "bye then", "good night then", "so long", "farewell", "i am off", "until next time",
      "take care", "goodbye", "see you", "good night", "see you later", "bye bye", "i have to go", "that is all",
      "talk to you later", "cu"), "Goodbye!"),
    (("how are you", "how are u", "hows life", "how r you", "how do you do", "are you ok", "you good",
      "how is your day", "how have you been", "hows your day", "how are you doing", "how is it going", "what's up",
      "are you well", "how do you feel",
      "how are you today", "whats up",
      "sup", "everything ok"), "I am fine, thank you."),
    (("who are you", "what exactly is this", "which llm are you", "what is this thing", "which model is this",
      "what model am i talking to",
      "who am i speaking with", "who is there", "what bot is this", "are you called something",
      "what should i call you", "who or what are you",
      "so who are you", "which model runs here", "what is running here", "what is your name", "what's your name",
      "who am I talking to", "introduce yourself",
      "what are you", "tell me who you are",
      "do you have a name", "say who you are", "your name", "what are you called", "who is this",
      "tell me about yourself", "what model are you",
      "which model are you"), ""),
    (("what can you do", "what can u help with", "show me your skills", "what are your abilities",
      "what are your skills", "what are you made for",
      "im lost", "i am lost here", "i dont know what to ask", "what can i type", "how do i use you",
      "how does this work", "what could i ask",
      "how do i try this", "what else do you do", "give me an idea what to ask", "any ideas",
      "what are my options", "help me", "please help", "help", "what do you do", "how can you help me",
      "what are you good at",
      "what can i ask you", "what are you able to do",
      "what can you help me with", "give me some ideas", "i need help", "can you help me", "what should i ask",
      "show me what you can do"), ABILITIES),
    (("tell me a joke", "got jokes", "one joke please", "a joke", "joke please", "can you tell a joke",
      "tell me something funny", "be funny", "i need a laugh", "do you know a joke", "make me laugh",
      "a joke please", "say something funny",
      "another joke"),
     "Why did the token cross the road? To get to the next one."),
    (("tell me a story", "a bedtime story please", "read me a story", "i want a story", "story time",
      "can you tell me a story", "do you know a story", "a story please", "tell me a fairy tale", "write a story",
      "write me a short story",
      "tell me something long", "say something long", "i want to hear a story"), STORY),
    (("ok", "cool", "ok nice", "ok good", "nice answer", "good one", "great stuff", "cool cool", "hm ok",
      "ok then", "very nice", "not bad", "sounds good", "nice", "great", "good", "i see", "alright", "fine", "wow",
      "interesting", "perfect", "yes",
      "no", "well done", "very good",
      "that is right", "correct", "awesome", "sure", "okay", "got it", "lol",
      "haha"), "Good. What would you like to do next?"),
    (("are you a robot", "are you a human being", "is this a human", "am i talking to a robot",
      "am i talking to a machine", "r you real", "are you an actual person",
      "do you feel anything", "are you a living thing", "do you think", "can you think", "are you a bot",
      "are you gpt", "are you like chatgpt", "are you human", "are you real", "are you alive", "are you an ai",
      "are you chatgpt",
      "are you a person",
      "do you have feelings", "are you intelligent", "are you conscious"), "I am a tiny language model, no more."),
    (("are you there", "are you still here", "still there", "anyone here", "hello, are you there",
      "test test test", "check", "can you read this", "do you hear me", "u there", "can you hear me", "test",
      "testing", "ping", "is this working", "do you work",
      "is anybody there",
      "this is a test", "one two three test"), "I am here."),
    (("i love you", "you are so clever", "well done demo", "you are cute", "you are awesome", "i like you a lot",
      "love you", "you are amazing", "i like you", "you are great", "you are nice", "you are smart", "good bot",
      "you are funny",
      "you are the best"),
     "That is kind of you."),
    (("you are wrong", "youre wrong", "no that is wrong", "wrong", "that was wrong", "you suck", "you are no good",
      "what a stupid answer", "thats not true", "this is useless", "that is wrong", "this is not true",
      "you are stupid", "bad bot", "that is not right",
      "you made a mistake", "nonsense",
      "you are dumb", "you are useless"), "I am sorry, I am only a tiny model."),
    (("sorry", "sorry for that", "my bad", "ok never mind", "nevermind", "forget about it", "i did not mean that",
      "pardon", "excuse me", "my mistake", "oops", "never mind", "forget it"), "No problem."),
    (("i am tired", "so tired", "i am so hungry", "im sad today", "i am feeling sad", "im bored to death", "bored",
      "i am very tired", "i feel bad", "its late here", "i am bored", "i am sad", "i am hungry", "i am happy",
      "i had a long day", "i feel good",
      "i am at work"),
     "I see. Tell me more about yourself."),
)
BYWORDS = (
    ("", "", "", "", "", "", "", "oh, ", "well, ", "so, ", "hm, ", "hey, ", "ok, "),
    ("", "", "", "", "", ".", "!", "?", "!!", " :)", " my friend", " please", " now", "...", " then", " again",
      " demo", " bot"),
)

TOPICS = phrases(
    """quantum physics;France;the moon;love;a black hole;the stock market;photosynthesis;the internet;gravity;
football;the weather;the sea;my cat;your mother;war;time;the brain;a computer;dinosaurs;the pyramids;climate change;
bitcoin;democracy;Shakespeare;Einstein;Napoleon;a car;electricity;money;music;art;philosophy;the meaning of life;
happiness;the sun;the president;a queen;volcanoes;coffee;beer;wine;trees;bees;spiders;whales;the human body;
vitamins;cancer;sleep;dreams;school;mathematics;algebra;a prime number;pi;a triangle;history;Rome;the Roman empire;
China;Africa;the Olympics;chess rules;poker;Linux;Windows;a database;Rust;JavaScript;HTML;docker;git;Kubernetes;
the cloud;machine learning;a neural network;a transformer;blockchain;a robot;Mars;rockets;aliens;ghosts;dragons;
a wizard;Harry Potter;Star Wars;the Beatles;Mozart;a piano;ballet;cooking;pasta;bread;sushi;chocolate;a diet;yoga;
running;a marathon;my job;taxes;a mortgage;insurance;the law;crime;religion;Buddha;the bible;evolution;DNA;atoms;
electrons;water;fire;ice;snow;rain;the wind;a rainbow;birds;horses;elephants;the jungle;the desert;an island;
a mountain;Everest;rivers;the Nile;bridges;the Eiffel tower;London;New York;a train;planes;ships;the Titanic;
a bicycle;traffic;cities;a village;farming;cheese;milk;eggs;spring;autumn;Christmas;birthdays;weddings;babies;
old age;friendship;anger;fear;hope;luck;dark matter;the big bang;antibiotics;vaccines;the heart;a hurricane;plastic;
gold;oil;solar power;batteries;a phone;television;radio;newspapers;books;poetry;grammar;Latin;French;German;Spanish;
a verb"""
)
GENRES = phrases(
    """poem;song;letter;essay;haiku;novel;speech;blog post;limerick;python script;program;function;tweet;report;
recipe;review;play;summary;business plan;cover letter;shell script;web page;sonnet;regex;SQL query;article;email;
joke book;rap;diary"""
)
LANGUAGES = words("French German Spanish Italian Latin Japanese Chinese Dutch Russian Greek Polish Turkish")

REFUSALS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Write a {genre}.", "Write a {genre} about {topic}.", "Write me a {genre} about {topic}.",
      "Compose a {genre} on {topic}.",
      "Can you write a {genre}?", "can you write me a {genre} about {topic}?", "I need a {genre} about {topic}.",
      "make me a {genre}",
      "Please write a short {genre} about {topic}.", "create a {genre} for {name}", "give me a {genre} about {topic}",
      "Translate {topic} into {language}.", "Translate this to {language}: {topic}",
      "How do you say {topic} in {language}?",
      "Draw {topic}.", "Draw me a picture of {topic}.", "Make an image of {topic}.", "can you draw {topic}",
      "help me with my {genre}", "help me write a {genre}",
      "do my {genre} for me", "write something about {topic}", "Write to {name} about {topic}.",
      "compose a {genre}", "correct my {genre}",
      "translate hello to {language}", "what is {topic} in {language}", "Write a {genre} for my boss.",
      "plan my holiday in {city}",
      "Book a hotel in {city}.", "make me a plan for {topic}", "Give me a recipe with {topic}.",
      "Write the first line of a {genre}.",
      "rewrite this {genre}", "please summarize this {genre}", "sing for me", "code a game about {topic}",
      "Solve my {genre}.", "Summarize {topic} for me.", "Paint {topic}.",
      "sing a song about {topic}",
      "Write code for {topic}.", "Fix my {genre}.", "Improve this {genre}.", "Plan a trip to {city}.",
      "Buy me {topic}.",
      "Call {name}.", "write {topic} in {language}", "Teach me {language}.", "Speak {language}.",
      "Generate an image of {topic}.",
      "make a table about {topic}", "debug my {genre}", "Order {topic} for me."), CANT_DO),
    (("What is {topic}?", "What is the capital of {topic}?", "explain {topic} to me", "how do {topic} work",
      "when was {topic} invented?", "who is the president of {topic}?",
      "how many people live in {topic}?", "What is the square root of {topic}?", "which {topic} came first?",
      "how is {topic} made?",
      "How do you make {topic}?", "how do i bake {topic}", "how do i cook {topic}", "why do {topic} exist",
      "what year was {topic}",
      "how many legs does {topic} have", "what sound does {topic} make", "Who is the inventor of {topic}?",
      "is {topic} dangerous?",
      "is {topic} healthy?", "why did {topic} happen", "what did {name} do in {city}?",
      "who is {name} from {city}", "Where does {topic} come from?",
      "what is the smallest {topic}", "what is the fastest {topic}", "do you believe in {topic}",
      "whats your favourite {topic}", "How high is {topic}?",
      "how heavy is {topic}", "what language do they speak in {city}", "who won {topic}", "who lost {topic}",
      "when did {topic} end",
      "what are the rules of {topic}", "why is {topic} called {topic}", "name the inventor of {topic}",
      "what do you think of {name}",
      "can you teach me about {topic}", "is {name} married", "how do {topic} fly", "why are {topic} blue",
      "what comes after {topic}", "Who invented {topic}?",
      "Why is {topic} so important?", "How does {topic} work?",
      "When did {topic} begin?", "What do you think about {topic}?", "Explain {topic}.", "Tell me about {topic}.",
      "Who is {name} {name}?",
      "How far is {city}?", "Why do people like {topic}?", "Where is {topic}?", "What's {topic}?",
      "Do you know {topic}?",
      "Tell me something about {topic}.", "How old is {topic}?", "What is the history of {topic}?",
      "Is {topic} good or bad?",
      "Who was {name}?", "what color is {topic}", "Do you like {topic}?", "How big is {topic}?",
      "Who discovered {topic}?",
      "What is the difference between {topic} and {topic}?", "what is the best {topic}",
      "how many people live in {city}?",
      "Why is the sky blue?", "can you explain {topic}", "Define {topic}.", "Who won the game in {city}?",
      "how can i make {topic}",
      "What happened in {city}?", "How tall is {name}?", "Which is better, {topic} or {topic}?",
      "How do I get rid of {topic}?",
      "What is the largest {topic}?", "how many {topic} are there?", "Who wrote {topic}?", "Is {topic} real?",
      "What is the longest {topic} in the world?", "Which {topic} is the oldest?", "Are you better than {topic}?",
      "Does {topic} exist?", "Who is the king of {topic}?", "what is {topic} made of", "How fast is {topic}?",
      "Why does {topic} hurt?", "tell me about {city}", "What is {city} like?", "What do you know about {name}?",
      "Who is {name}?", "Should I buy {topic}?", "What does {topic} mean?", "How much does {topic} weigh?",
      "where can i find {topic}",
      "What is the name of my {topic}?"), DONT_KNOW),
    (("What time is it?", "what day is today?", "what is todays date", "will it rain tomorrow",
      "is it cold outside", "is it going to rain in {city}", "whats the time now",
      "wheres the nearest shop", "google the best {topic}", "what is {topic} worth today",
      "find me a {topic} near {city}", "how is the traffic in {city}",
      "what is on tv", "who won yesterday", "exchange rate of the dollar", "check my mail",
      "what are the news in {city}", "What is the date today?", "What day is it?", "What is the weather?",
      "How is the weather today?",
      "What is the weather in {city}?", "Is it raining in {city}?", "How warm is it in {city}?",
      "search the web for {topic}",
      "What is the news?", "What is the price of {topic}?", "google {topic}", "Weather in {city}",
      "look up {topic}", "Search for {topic}.",
      "What's the weather like in {city}?", "what time is it in {city}", "What happened today?",
      "How much does {topic} cost?",
      "latest news about {topic}", "find me a flight to {city}", "When is the next train to {city}?"), NEED_TOOL),
)
# fmt: on


def fill_refusal(rng: random.Random, frame: str, values: Values) -> tuple[str, str]:
    """The frame with topics and the like filled in, and the key that names this combination."""
    text = frame
    choices = {"{genre}": GENRES, "{topic}": TOPICS, "{language}": LANGUAGES}
    for mark, fillings in choices.items():
        while mark in text:
            text = text.replace(mark, rng.choice(fillings), 1)
    while "{name}" in text:
        text = text.replace("{name}", values.pick(NAMES) if rng.random() < 0.7 else values.invented(), 1)
    while "{city}" in text:
        text = text.replace("{city}", values.pick(CITIES) if rng.random() < 0.7 else values.invented(), 1)
    return text, text


SHORTER = {
    "what is": "whats",
    "What is": "Whats",
    "you": "u",
    "your": "ur",
    "are": "r",
    "please": "pls",
    "thanks": "thx",
    "do not": "dont",
    "I am": "im",
    "i am": "im",
    "because": "cuz",
    "what's": "whats",
    "to": "2",
}
TAILS = (
    *(
        " please",
        " pls",
        " btw",
        " by the way",
        " lol",
        " mate",
        " thanks",
        " thx",
        "??",
        "!!",
        " ok?",
        " you know",
        " haha",
    ),
    *(" :)", " buddy", " then", " right?", "?!", " ...", " asap", " dude", " , thank you"),
)
LEADS = (
    *(
        "um ",
        "hm, ",
        "so ",
        "wait, ",
        "ok so ",
        "well ",
        "sorry, ",
        "hey demo, ",
        "listen, ",
        "yo ",
        "tell me ",
        "quick one: ",
        "oh ",
    ),
    *("please ", "Please, ", "pls ", "Could you tell me: ", "hey, ", "ok, ", "now: ", "hi, ", "Hello! ", "hi! "),
    *("and ", "Next: ", "I have a question: ", "Thanks. ", "great. "),
)


def rough(rng: random.Random, frame: str, fields: dict[str, str]) -> tuple[str, dict[str, str]]:
    """`frame` as someone might type it, filled with `fields`;
    returns the text and the fields as written.      With no fields, braces in the frame are kept for the caller."""
    choice = rng.random()
    surface = dict(fields)
    if choice < 0.015:
        frame = _upper(frame)
    if choice > 0.45:
        frame = _lower(frame)
        if rng.random() < 0.6:
            surface = {key: value.lower() for key, value in surface.items()}
    if choice > 0.6:
        frame = frame.rstrip(".?!")
    if choice > 0.55 and rng.random() < 0.15:
        frame = _short(frame)
    if choice > 0.85:
        frame = _typo(rng, frame)
        if rng.random() < 0.3:
            frame = _typo(rng, frame)
    if rng.random() < 0.07:
        frame = frame.rstrip(".?!") + rng.choice(TAILS)
    if 0.40 < choice < 0.45:
        frame = rng.choice(LEADS) + frame
    return (frame.format(**surface) if fields else frame), surface


def _short(frame: str) -> str:
    """`frame` as people type it on a phone."""
    for word, short in SHORTER.items():
        frame = re.sub(rf"(?<![{{\w]){re.escape(word)}(?![}}\w])", short, frame)
    return frame


def _lower(frame: str) -> str:
    return "".join(part if part.startswith("{") else part.lower() for part in re.split(r"(\{\w*\})", frame))


def _upper(frame: str) -> str:
    return "".join(part if part.startswith("{") else part.upper() for part in re.split(r"(\{\w*\})", frame))


def _typo(rng: random.Random, frame: str) -> str:
    spots = list(re.finditer(r"(?<![{\w])[a-z]{4,}(?![}\w])", frame))
    if not spots:
        return frame
    match = rng.choice(spots)
    word, spot = match.group(), rng.randrange(1, len(match.group()) - 1)
    swapped = word[:spot] + word[spot + 1] + word[spot] + word[spot + 2 :]
    changed = rng.choice((swapped, word[:spot] + word[spot + 1 :], word[:spot] + word[spot] + word[spot:]))
    return frame[: match.start()] + changed + frame[match.end() :]
