"""Common words with their definitions, and common relations, from which short documents and questions are made."""

DEFINITIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "shapes": (
        ("triangle", "a flat shape with three sides"),
        ("square", "a flat shape with four equal sides"),
        ("circle", "a round flat shape without corners"),
        ("cube", "a solid with six square faces"),
        ("pentagon", "a flat shape with five sides"),
        ("hexagon", "a flat shape with six sides"),
    ),
    "animals": (
        ("spider", "a small animal with eight legs that spins webs"),
        ("bee", "an insect that makes honey"),
        ("whale", "the largest animal in the sea"),
        ("giraffe", "the animal with the longest neck"),
        ("frog", "a small green animal that jumps and lives near ponds"),
        ("owl", "a bird that hunts at night"),
    ),
    "time": (
        ("week", "a period of seven days"),
        ("minute", "a period of sixty seconds"),
        ("century", "a period of one hundred years"),
        ("decade", "a period of ten years"),
        ("hour", "a period of sixty minutes"),
        ("year", "the time that the earth takes to go around the sun"),
    ),
    "weather": (
        ("snow", "frozen water that falls in white flakes"),
        ("rain", "water that falls from clouds in drops"),
        ("fog", "a thick cloud near the ground"),
        ("thunder", "the loud sound that follows lightning"),
        ("wind", "moving air"),
        ("ice", "frozen water"),
    ),
    "tools": (
        ("thermometer", "a tool that measures temperature"),
        ("clock", "a tool that shows the time"),
        ("compass", "a tool whose needle points north"),
        ("telescope", "a tool for looking at distant stars"),
        ("hammer", "a tool for driving nails"),
        ("scale", "a tool that measures weight"),
    ),
    "people": (
        ("baker", "a person who makes bread"),
        ("teacher", "a person who teaches in a school"),
        ("pilot", "a person who flies airplanes"),
        ("doctor", "a person who treats sick people"),
        ("farmer", "a person who grows crops and keeps animals"),
        ("author", "a person who writes books"),
    ),
}

RELATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "{b} is the capital of {a}": (
        ("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Spain", "Madrid"),
        ("Germany", "Berlin"), ("Russia", "Moscow"), ("Greece", "Athens"), ("Austria", "Vienna"), ("Cuba", "Havana"),
    ),
    "{a} is made from {b}": (
        ("bread", "flour"), ("cheese", "milk"), ("wine", "grapes"), ("glass", "sand"), ("paper", "wood"),
        ("chocolate", "cocoa"), ("steel", "iron"), ("candles", "wax"), ("leather", "hides"), ("butter", "cream"),
    ),
    "a young {a} is called a {b}": (
        ("dog", "puppy"), ("cat", "kitten"), ("cow", "calf"), ("horse", "foal"), ("sheep", "lamb"),
        ("bear", "cub"), ("goat", "kid"), ("duck", "duckling"), ("deer", "fawn"), ("pig", "piglet"),
    ),
    "the opposite of {a} is {b}": (
        ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("early", "late"), ("high", "low"),
        ("old", "young"), ("wet", "dry"), ("full", "empty"), ("hard", "soft"), ("loud", "quiet"),
    ),
}  # fmt: skip

RELATION_QUESTIONS = {
    "{b} is the capital of {a}": "Which city is the capital of {a}?",
    "{a} is made from {b}": "From what is {a} made?",
    "a young {a} is called a {b}": "What is a young {a} called?",
    "the opposite of {a} is {b}": "What is the opposite of {a}?",
}
