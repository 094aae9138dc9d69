"""`omnistage bench speech`: how soon, how fast and how evenly a server speaks."""
