# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report in headless Chromium: errors, filters, numbers, keys, a phone."""

import pathlib
import re
import sys

import numpy as np
import pytest

from report_test import HOSTILE
from report_test import rendered
from report_test import write_run
from searchrl.agent import tokenizer as tokenizers
from searchrl.evaluation.report import reading
from searchrl.experiment import policy

webdriver = pytest.importorskip('selenium.webdriver')
by = pytest.importorskip('selenium.webdriver.common.by').By
keys = pytest.importorskip('selenium.webdriver.common.keys').Keys
waits = pytest.importorskip('selenium.webdriver.support.ui')
sys.path.append(str(pathlib.Path(__file__).parents[1] / 'benchmarks'))
import report_page

open_page, until = report_page.open_page, report_page.until
pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.skipif(
    not (report_page.CHROMIUM and report_page.DRIVER),
    reason="needs Debian's chromium-driver")]


@pytest.fixture(scope='module', name='file')
def _file(tmp_path_factory):
  folder = tmp_path_factory.mktemp('page')
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  played = [write_run(folder / name, tokenizer, count=8, seed=n)
            for n, name in enumerate(('one', 'two'))]
  (folder / 'page.html').write_text(rendered(reading.runs(
      [str(folder / 'one'), str(folder / 'two')])), encoding='utf-8')
  return folder / 'page.html', played[0]


@pytest.fixture(name='browser')
def _browser(file, tmp_path):
  browser = report_page.open_browser(tmp_path)
  try:
    open_page(browser, file[0].as_uri())
    yield browser
    assert browser.get_log('browser') == []  # no error, of any test
  finally:
    browser.quit()


def count(browser):
  return browser.find_element(by.ID, 'count').text


def press(browser, keys):
  webdriver.ActionChains(browser).send_keys(keys).perform()


def inspected(browser):
  return {one.get_attribute('data-name'): one.find_element(
      by.TAG_NAME, 'b').text for one in browser.find_elements(
          by.CSS_SELECTOR, '#inspector [data-name]')}


def choose(browser, name, value):
  waits.Select(browser.find_element(
      by.CSS_SELECTOR, f'#filters [name={name}]')).select_by_value(value)


def test_filters_leave_what_they_say(browser):
  assert count(browser) == '16 of 16'
  choose(browser, 'run', 'two')
  assert count(browser) == '8 of 16'
  browser.find_element(by.NAME, 'text').send_keys('jürgen')
  assert count(browser) == '2 of 16'
  browser.find_element(by.NAME, 'low').send_keys('0.6')
  assert count(browser) == '0 of 16'  # each has .5
  choose(browser, 'part', 'format')
  assert count(browser) == '2 of 16'
  browser.find_element(by.CSS_SELECTOR, '#filters [type=reset]').click()
  until(browser, "return document.getElementById('count').textContent"
                 " == '16 of 16'")
  browser.find_element(by.NAME, 'text').send_keys('lovelace wrote')
  until(browser, "return document.getElementById('count').textContent"
                 " == '16 of 16'")  # of the passages


def test_hover_shows_the_numbers_of_the_record(browser, file):
  browser.find_elements(by.CSS_SELECTOR, '#list .row')[1].click()
  until(browser, "return document.querySelectorAll('.policy .t').length")
  one = file[1][1]
  found = browser.find_elements(by.CSS_SELECTOR, '.conversation .t')
  assert len(found) == len(one.tokens)
  advantage = np.linspace(-1, 1, 8)[1]
  for position in [n for n, of in enumerate(one.loss_mask) if of][::3]:
    webdriver.ActionChains(browser).move_to_element(found[position]).perform()
    numbers = inspected(browser)
    assert numbers['token'] == str(position)
    assert numbers['by'] == 'policy' and numbers['in the loss'] == 'yes'
    assert float(numbers['log-prob']) == pytest.approx(
        one.behavior_logprobs[position], rel=1e-3)
    assert float(numbers['ratio']) == pytest.approx(np.exp(0.1), rel=1e-3)
    assert float(numbers['advantage']) == pytest.approx(advantage, rel=1e-3)
  webdriver.ActionChains(browser).move_to_element(found[0]).perform()
  assert inspected(browser) == {
      'token': '0', 'by': 'prompt', 'in the loss': 'no'}


def test_a_curve_shows_its_numbers(browser):
  """The outcome is n / 8 in step n, with two runs of one recipe: a mean."""
  figure = browser.find_element(by.CSS_SELECTOR, '.curve')
  box = figure.rect
  webdriver.ActionChains(browser).move_to_element_with_offset(
      figure, round(box['width'] * 0.45), 0).perform()
  tip = figure.find_element(by.CSS_SELECTOR, '.tip')
  assert tip.text.split() == ['step', '4', '0.5']
  assert len(figure.find_elements(by.CSS_SELECTOR, '.mark')) == 1


def test_the_chosen_stays_in_the_list(browser):
  browser.find_elements(by.CSS_SELECTOR, '#list .row')[1].click()
  choose(browser, 'run', 'two')
  assert count(browser) == '8 of 16'
  chosen = browser.find_element(by.CSS_SELECTOR, '#list [aria-selected=true]')
  assert chosen.get_attribute('id') == 'row-1'
  assert 'outside' in chosen.get_attribute('class')


def test_colours_have_a_legend_and_small_ratios_are_seen(browser):
  """All ratios are exp(.1): the largest distance has the full colour."""
  browser.find_elements(by.CSS_SELECTOR, '#list .row')[1].click()
  until(browser, "return document.querySelectorAll('.policy .t').length")
  key = browser.find_element(by.ID, 'key')
  assert 'policy' in key.text and 'observation' in key.text
  press(browser, 'cc')
  assert 'full colour: 1 ± 0.1052' in key.text
  token = browser.find_element(by.CSS_SELECTOR, '.policy .t.up')
  assert re.search(r'--a: (1|0.99)', token.get_attribute('style'))


def test_hostile_text_is_shown_and_does_nothing(browser):
  browser.find_elements(by.CSS_SELECTOR, '#list .row')[2].click()
  until(browser, "return document.querySelectorAll('.policy .t').length")
  assert browser.find_element(by.CSS_SELECTOR, '#detail h3').get_attribute(
      'textContent') == HOSTILE
  assert not browser.find_elements(by.TAG_NAME, 'img')


def test_keys_walk_through_trajectories_and_tokens(browser):
  press(browser, 'jj')
  until(browser, "return document.querySelectorAll('.policy .t').length")
  assert browser.find_element(
      by.CSS_SELECTOR, '#list [aria-selected=true]').get_attribute('id'
                                                                 ) == 'row-1'
  press(browser, [keys.ARROW_RIGHT] * 3)
  assert inspected(browser)['token'] == '2'
  press(browser, 'c')
  assert browser.find_element(by.ID, 'colour').get_property(
      'value') == 'logprobs'
  press(browser, '/x')
  assert browser.find_element(by.NAME, 'text').get_property('value') == 'x'


def test_the_address_finds_the_same_view_again(browser):
  choose(browser, 'run', 'two')
  browser.find_elements(by.CSS_SELECTOR, '#list .row')[3].click()
  until(browser, "return document.querySelectorAll('.policy .t').length")
  open_page(browser, browser.current_url)
  assert count(browser) == '8 of 16'
  assert 'two' in browser.find_element(by.CSS_SELECTOR, '#detail .facts').text


def test_light_and_dark_and_a_phone(browser):
  def ground():
    return browser.execute_script(
        'return getComputedStyle(document.body).backgroundColor')
  light = ground()
  browser.find_element(by.ID, 'theme').click()
  assert ground() != light
  browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', {
      'width': 390, 'height': 844, 'deviceScaleFactor': 2, 'mobile': True})
  assert until(browser, 'return document.documentElement.scrollWidth <= 390')
  browser.execute_script("document.querySelector('#list .row').click()")
  until(browser, "return document.querySelectorAll('.policy .t').length")
  browser.find_element(by.ID, 'back').click()
  assert browser.find_element(by.ID, 'list').is_displayed()
