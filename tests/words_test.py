# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""words: a table of scripts, and the rules of Unicode's annex 29 in a loop."""

import functools
import random
import re
import time

import pytest
import regex

from searchrl.search.index import bm25
from searchrl.search.index import words
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query, Question

_CLASSES = ('ALetter', 'Hebrew_Letter', 'Numeric', 'Katakana', 'ExtendNumLet',
            'Extend', 'Format', 'ZWJ', 'MidLetter', 'MidNum', 'MidNumLet',
            'Single_Quote', 'Double_Quote', 'CR', 'LF', 'Newline')
_LETTERS = ('ALetter', 'Hebrew_Letter')


@functools.cache
def class_of(character):
  """The annex's Word_Break, but Han, kana and Thai have classes of their own."""
  for name in _CLASSES:
    if regex.match(rf'\p{{WB={name}}}', character):
      return name
  if regex.match(r'[\p{Script=Han}\p{Script=Hiragana}]', character):
    return 'Alone'
  if regex.match(r'\p{Line_Break=Complex_Context}', character):
    return 'Complex'
  return 'Other'


def words_oracle(text):
  """Words of the rules WB3 to WB13, applied to each pair of characters."""
  groups = []  # (class, text): a character with its marks, rule WB4
  for character in text:
    name = class_of(character)
    if name in ('Extend', 'Format', 'ZWJ') and groups and groups[-1][0] not in (
        'CR', 'LF', 'Newline'):
      groups[-1][1] += character
    else:
      groups.append([name, character])
  names = ['', '', *(name for name, _ in groups), '', '']

  def joins(i):
    """Returns whether group i belongs to the word of the group before it."""
    before2, before, name, after = names[i:i + 4]
    mid_letter = ('MidLetter', 'MidNumLet', 'Single_Quote')
    mid_digit = ('MidNum', 'MidNumLet', 'Single_Quote')
    both = (*_LETTERS, 'Numeric')
    return (
        before in both and name in both  # WB5, WB8, WB9, WB10
        or before in _LETTERS and name in mid_letter and after in _LETTERS
        or before2 in _LETTERS and before in mid_letter and name in _LETTERS
        or before == 'Hebrew_Letter' and name == 'Single_Quote'
        or before == name == 'Complex'  # Lucene's: no break without a list
        or (before, name, after) == (
            'Hebrew_Letter', 'Double_Quote', 'Hebrew_Letter')
        or (before2, before, name) == (
            'Hebrew_Letter', 'Double_Quote', 'Hebrew_Letter')
        or before2 == 'Numeric' and before in mid_digit and name == 'Numeric'
        or before == 'Numeric' and name in mid_digit and after == 'Numeric'
        or before == name == 'Katakana'
        or before in (*both, 'Katakana', 'ExtendNumLet') and (
            name == 'ExtendNumLet')
        or before == 'ExtendNumLet' and name in (*both, 'Katakana'))

  result = []
  for i, (name, part) in enumerate(groups):
    if result and joins(i):
      result[-1][0].add(name)
      result[-1][1] += part
    else:
      result.append([{name}, part])
  return [part for kinds, part in result if kinds & {
      *_LETTERS, 'Numeric', 'Katakana', 'Alone', 'Complex'}]


# Words are between bars.
TABLE = {
    'Latin': '|The| |river’s| |naïve| |Cafés| (|1,000.5|), |U.S.A|.',
    'Latin, decomposed': '|Cafe\u0301s| |a\u0300| |la\u0300| |nai\u0308ve|',
    'Vietnamese, decomposed': '|Tie\u0302\u0301ng| |Vie\u0323\u0302t|',
    'Greek': '|Ἀθῆναι| |καὶ| |Ελληνικα\u0301|',
    'Cyrillic': '|Нижнии\u0306| |Новгород|, |1,5|',
    'Armenian': '|Հայաստան|։ |Երեւան|',
    'Hebrew': '|שָׁלוֹם| |צה"ל| |צ\'| "|רב|"',
    'Arabic': '|مُحَمَّدٌ| |كِتَابٌ|، |١٢٫٥| |۱۲۳|',
    'Persian': '|می\u200cخواهم| |کتاب|؟',
    'Syriac': '|ܫܠܵܡܵܐ| |ܐܠܵܗܵܐ|',
    'Thaana': '|ދިވެހި| |ރާއްޖެ|',
    'Devanagari': '|हिन्दी| |में|। |क्षेत्र| |१२|',
    'Bengali': '|বাংলা| |ভাষা|',
    'Gurmukhi': '|ਪੰਜਾਬੀ| |ਗੁਰਮੁਖੀ|',
    'Gujarati': '|ગુજરાતી| |ભાષા|',
    'Oriya': '|ଓଡ଼ିଆ| |ଭାଷା|',
    'Tamil': '|தமிழ்| |மொழி|',
    'Telugu': '|తెలుగు| |భాష|',
    'Kannada': '|ಕನ್ನಡ| |ಭಾಷೆ|',
    'Malayalam': '|മലയാളം| |ഭാഷ|',
    'Sinhala': '|සිංහල| |ශ්‍රී| |ලංකා|',
    'Thai': '|ภาษาไทย| |กรุงเทพฯ| |๑๒|',
    'Lao': '|ພາສາລາວ|',
    'Khmer': '|ភាសាខ្មែរ|',
    'Myanmar': '|မြန်မာဘာသာ|',
    'Tibetan': '|བོད|་|སྐད|།',
    'Georgian': '|საქართველო|, |თბილისი|',
    'Ethiopic': '|አማርኛ|፣ |ኢትዮጵያ|።',
    'Cherokee': '|ᏣᎳᎩ| |ᎦᏬᏂᎯᏍᏗ|',
    'Mongolian': '|ᠮᠣᠩᠭᠣᠯ| |ᠬᠡᠯᠡ|',
    'Hangul': '|한국어| |서울|, |\u1112\u1161\u11ab|',
    'Han': '|東||京||々|。|東||京|',
    'Hiragana': '|ひ||ら||か\u3099||な|',
    'Katakana': '|タワー||東|・|ｶﾞｷ|-|カタカナ_a|',
    'Deseret': '|𐐔𐐯𐑅𐐨𐑉𐐯𐐻| |𐐈|',
    'Chakma': '|𑄌𑄋𑄴𑄟𑄳𑄦|',
}


@pytest.mark.parametrize('script', TABLE)
def test_words_of_a_script(script):
  expected = re.findall(r'\|([^|]+)\|', TABLE[script])
  text = TABLE[script].replace('|', '')
  assert words.split(text) == expected
  assert words_oracle(text) == expected


@pytest.mark.parametrize('seed', range(4))
def test_random_texts_are_split_as_the_rules_say(seed):
  rng = random.Random(seed)
  letters = 'aBé9_7ж٣אβ한ｶア東ひไท\u0301\u05b0\u200d\u00ad\u093f'
  others = ' .,:;\'"’·\u202f״،\u200b-\n²'
  for _ in range(3000):
    text = ''.join(rng.choice(letters if rng.random() < 0.7 else others)
                   for _ in range(rng.randrange(12)))
    if re.search(r"א[^\s]*'[^\s]*[0-9٣_]", text):
      continue  # Lucene joins what follows the quote of a Hebrew word
    assert words.split(text) == words_oracle(text), repr(text)


def test_latin_texts_are_split_alike_alone_and_beside_other_scripts():
  rng = random.Random(0)
  for _ in range(3000):
    text = ''.join(rng.choice("abZ019é_'’.,:;· -“") for _ in range(12))
    assert words.split(text) == words_oracle(text)
    assert words.split(f'{text}東') == [*words.split(text), '東']


@pytest.mark.parametrize('text', [
    'ж' + '_' * 100_000, 'жa_' * 50_000, "жx'" * 50_000, 'ж1.' * 50_000,
    'ж_\u0301' * 30_000, '_\u0301' * 30_000, 'e' + '\u0301' * 100_000,
    'א\u05b0"' * 30_000, "א\u05b0'" * 30_000, 'ไทย' * 30_000])
def test_the_time_grows_with_the_length_of_a_text(text):
  begun = time.process_time()
  words.split(text)
  assert time.process_time() - begun < 3


def test_words_that_share_consonants_alone_are_not_found():
  corpus = Corpus((Passage('0', 'हिन्दी', 'हिन्दी भाषा'),
                   Passage('1', 'हानि', 'हन दा ह न द')))
  question = Question('q', 'हिन्दी', ('x',))
  found, = bm25.bm25(corpus)([Query('हिन्दी', 3, question)])
  assert [passage.id for passage in found] == ['0']
