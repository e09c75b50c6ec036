# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""The report's page in headless Chromium: when it is painted, what it looks like.

  apt-get install chromium-driver   # Debian's; and pip install -e '.[test]'
  python -m searchrl.main --config=configs/report.py
  python benchmarks/report_page.py --page runs/report/report.html --pictures docs/images

Prints the page's size, and of several loads the median seconds from the request
to the first paint, to the list that can be used, and of a search in all texts.
"""

import argparse
import pathlib
import shutil
import statistics
import tempfile
import time

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support import ui

CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
_FLAGS = ('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic',
          '--no-first-run', '--disable-background-networking',
          '--disable-component-update', '--disable-sync',
          '--window-size=1300,900', '--force-prefers-reduced-motion')
_PAINT = '''return performance.getEntriesByName('first-contentful-paint')
    .map(entry => entry.startTime / 1000)[0]'''
_PHONE = dict(width=390, height=844, deviceScaleFactor=2, mobile=True)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--page', required=True, type=pathlib.Path)
  parser.add_argument('--loads', type=int, default=7)
  parser.add_argument('--pictures', type=pathlib.Path, help='a folder for PNGs')
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as profile:
    browser = open_browser(profile)
    try:
      measure(browser, options.page, options.loads)
      if options.pictures:
        photograph(browser, options.page, options.pictures)
    finally:
      browser.quit()


def open_browser(profile) -> webdriver.Chrome:
  """A browser that keeps nothing but in the folder `profile`."""
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM
  for flag in (*_FLAGS, f'--user-data-dir={profile}'):
    options.add_argument(flag)
  options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
  return webdriver.Chrome(
      options=options, service=webdriver.ChromeService(DRIVER))


def open_page(browser: webdriver.Chrome, address: str) -> None:
  """Loads a page, and waits until its trajectories can be chosen."""
  browser.get('about:blank')
  browser.get(address)
  until(browser, "return document.documentElement.dataset.ready == 'yes'")


def until(browser: webdriver.Chrome, script: str):
  """Waits until a script returns what is true, and returns it."""
  return ui.WebDriverWait(browser, 60, poll_frequency=0.02).until(
      lambda page: page.execute_script(script))


def measure(browser: webdriver.Chrome, page: pathlib.Path, loads: int) -> None:
  """Prints the table."""
  paints, ready, searches = [], [], []
  for _ in range(loads):
    open_page(browser, page.resolve().as_uri())
    ready.append(browser.execute_script('return performance.now() / 1000'))
    paints.append(until(browser, _PAINT))
    began = time.perf_counter()
    browser.find_element(By.NAME, 'text').send_keys('the')
    until(browser, "return !document.getElementById('count').textContent"
                   ".includes('reading')")
    searches.append(time.perf_counter() - began)
  count = browser.find_element(By.ID, 'count').text
  print(f'{browser.capabilities["browserVersion"]}: {count} trajectories, '
        f'{page.stat().st_size / 1e6:.2f} MB')
  for name, secs in (('first paint', paints), ('ready', ready),
                     ('search in all texts', searches)):
    print(f'{name:20} {statistics.median(secs):.2f} s '
          f'({min(secs):.2f} to {max(secs):.2f})')


def photograph(browser: webdriver.Chrome, page: pathlib.Path,
               folder: pathlib.Path) -> None:
  """Writes report_{top,trajectory,phone}.png; the phone is dark."""
  browser.set_window_size(1300, 1240)  # a story of four hops
  open_page(browser, page.resolve().as_uri())
  browser.save_screenshot(str(folder / 'report_top.png'))
  browser.set_window_size(1300, 900)
  last = browser.find_elements(By.CSS_SELECTOR, '#list .row')[2]
  last.click()
  until(browser, "return document.querySelectorAll('.policy .t').length")
  browser.execute_script(
      "document.getElementById('colour').value = 'advantages';"
      "document.getElementById('colour').dispatchEvent(new Event('change'));"
      "document.getElementById('trajectories').scrollIntoView();"
      "inspect(document.querySelectorAll('.prompt .t').length + 3)")
  browser.save_screenshot(str(folder / 'report_trajectory.png'))
  browser.find_element(By.ID, 'theme').click()
  browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', _PHONE)
  browser.execute_script("document.getElementById('detail').scrollIntoView()")
  browser.save_screenshot(str(folder / 'report_phone.png'))


if __name__ == '__main__':
  main()
