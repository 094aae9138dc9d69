"""Forms that are not read as they are written, by omnistage-nano's front end: one a line."""

from __future__ import annotations

import pytest

from model_families.omnistage_nano.front import Reader

DATES_AND_TIMES = """
2024-12-25 → December twenty fifth , twenty twenty four
on 2024-12-25, at noon → on December twenty fifth , twenty twenty four , at noon
1999-01-01T12:30:00 → January first , nineteen ninety nine at twelve thirty
12/25/2024 → December twenty fifth , twenty twenty four
25/12/24 → December twenty fifth , twenty twenty four
25.12.2024 → December twenty fifth , twenty twenty four
2024-13-45 → two zero two four , one three , four five
Dec. 25, 2024 → December twenty five , twenty twenty four
Jan 5 or May 31 → January five or May thirty one
Mon., Jan. 5 → Monday , January five
1st, 2nd, 22nd and 31st → first , second , twenty second and thirty first
1905, 2010s and '90s → nineteen oh five , twenty tens and nineties
1800's → eighteen hundreds
10am → ten A M
at 10 am → at ten A M
10 a.m. today → ten A M today
10:30 PM → ten thirty P M
9:00 a.m. sharp → nine A M sharp
at 5 p.m. The shop closes → at five P M . The shop closes
00:00 or 17:00 → midnight or seventeen hundred
10:00-11:00 → ten o'clock to eleven o'clock
9am-5pm → nine A M to five P M
10:30:45 → ten thirty forty five
"""
MEASURES = """
5'10" tall → five foot ten tall
6’2” → six foot two
100 km/h → one hundred kilometers per hour
80km/h, in km/h → eighty kilometers per hour , in kilometers per hour
5 m/s → five meters per second
9.8 m/s² → nine point eight meters per second squared
1 kg of flour → one kilogram of flour
10 lbs → ten pounds
250 ml → two hundred fifty milliliters
5 ft → five feet
I am 5 m away → I am five meters away
20 °C → twenty degrees Celsius
68°F → sixty eight degrees Fahrenheit
1° or 90° → one degree or ninety degrees
25 m² → twenty five square meters
10km² → ten square kilometers
2.5GHz → two point five gigahertz
16 GB at 3 MB/s → sixteen gigabytes at three megabytes per second
10-20km → ten to twenty kilometers
5G, 4K, 5g → five G , four K , five grams
1/2 km → one half kilometer
1 1/2 cups → one and one half cups
1½ → one and one half
2/3, 3/4, 7/8 → two thirds , three quarters , seven eighths
5/12 → five over twelve
24/7, 9/11, 50/50 → twenty four seven , nine eleven , fifty fifty
3x, 2x4, 10x faster → three times , two by four , ten times faster
50 % → fifty percent
5%-10% → five percent to ten percent
"""
MONEY = """
$1.5M → one point five million dollars
$2B → two billion dollars
$5 million or more → five million dollars or more
$5-10 → five to ten dollars
$5-$10 → five dollars to ten dollars
-$5 → minus five dollars
US$5 → five dollars
5€, 5 €, ¥500 → five euros , five euros , five hundred yen
5¢ → five cents
$5/month → five dollars per month
10%/year → ten percent per year
"""
ROWS_OF_DIGITS = """
555-123-4567 → five five five , one two three , four five six seven
call 555-1234 → call five five five , one two three four
100-2000 → one hundred to two thousand
+1 (555) 123-4567 now → plus one , five five five , one two three , four five six seven now
(555) 123-4567 → five five five , one two three , four five six seven
020 7946 0018 → zero two zero , seven nine four six , zero zero one eight
123-45-6789 → one two three , four five , six seven eight nine
127.0.0.1 → one hundred twenty seven dot zero dot zero dot one
3-5, 3–5, 3 - 5 → three to five , three to five , three to five
1914-1918 → nineteen fourteen to nineteen eighteen
.5 → point five
1.000.000 → one million
1234567890123456.5 → one two three four five six seven eight nine zero one two three four five six point five
"""
SIGNS = """
5 - 3 = 2 → five minus three equals two
5-3=2 → five minus three equals two
3 * 4 → three times four
5 < 6, <5 → five is less than six , less than five
10^2 → ten squared
x² → X squared
10⁻³ → ten to the power of minus three
1e5 → one times ten to the power of five
§ 5 → section five
#1 → number one
~5, ±3 → about five , plus or minus three
C#, C++ → C sharp , C plus plus
R&D, AT&T, Q&A → R and D , A T and T , Q and A
one—two → one , two
one – two → one , two
yes (no). Then → yes , no . Then
Wait, ? → Wait ?
"""
SHORT_FORMS = """
No. 5, no. 5 → number five , number five
No. It is → No . It is
pp. 6-9, Fig. 2 → pages six to nine , figure two
e.g. this, i.e. that → for example this , that is that
w/o, N/A → without , N A
St. Louis → saint Louis
Main St. is → Main street is
Mt. Everest → mount Everest
Apple Inc. The company → Apple incorporated . The company
cats, dogs, etc. and so on → cats , dogs , etc and so on
John F. Kennedy → John F Kennedy
J. K. Rowling → J K Rowling
Plan B. Then → Plan B . Then
the U.S.A. has → the U S A has
a Ph.D. student → a P H D student
A cat → a cat
An A. (a) → An A . A
the end.Next → the end . Next
"""
ROMAN_NUMBERS = """
Henry VIII → Henry the eighth
Louis XIV's → Louis the fourteenth's
Henry V. He → Henry the fifth . He
Elizabeth I, queen → Elizabeth the first , queen
World War II → World War two
Act I, Scene V → Act one , Scene five
Rocky II → Rocky two
Malcolm X → Malcolm X
The IV drip → The IV drip
told Mary I was → told Mary I was
"""
ADDRESSES = """
www.example.com/a?b=1. → W W W dot example dot com slash A question mark B equals one .
(https://example.com/) → example dot com
me@example.com, please → me at example dot com , please
example.org → example dot org
"""
TABLES = (DATES_AND_TIMES, MEASURES, MONEY, ROWS_OF_DIGITS, SIGNS, SHORT_FORMS, ROMAN_NUMBERS, ADDRESSES)
CASES = [line.split(" → ") for table in TABLES for line in table.strip().splitlines()]


@pytest.mark.parametrize(("written", "spoken"), CASES)
def test_a_form_is_read_as_people_read_it(written, spoken):
    assert " ".join(Reader().read(written, last=True)) == spoken
