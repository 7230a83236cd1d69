"""Every answer of a command in these tests has the keys that are documented."""

import json_answers

documented = json_answers.documented
