//! Just enough of Rust's lexical grammar to judge sources: comments and literals told apart from code, the parts that
//! exist only for tests, and the `mod` declarations that make a file part of a crate.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// A file's text taken apart.
pub struct Source {
    /// The text without comments, and with the contents of string and character literals removed; lines are kept.
    pub code: String,
    pub strings: Vec<Literal>,
    /// Where in `code` items under `#[cfg(test)]` stand.
    test_ranges: Vec<Range<usize>>,
}

/// A string literal.
pub struct Literal {
    pub text: String,
    /// Where in [`Source::code`] its opening quote stands.
    pub at: usize,
}

/// A `mod name;`, or an `include!`, that makes another file part of the crate.
struct Declaration {
    /// Relative to the folder in which the declaring file's modules are looked for.
    candidates: Vec<PathBuf>,
    /// Named by `#[path]` or `include!`: relative to the declaring file's own folder.
    explicit: Option<PathBuf>,
    test_only: bool,
}

impl Source {
    pub fn parse(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let mut source = Source { code: String::with_capacity(text.len()), strings: Vec::new(), test_ranges: Vec::new() };
        let mut i = 0;
        while i < chars.len() {
            i = match (chars[i], chars.get(i + 1)) {
                ('/', Some('/')) => line_end(&chars, i),
                ('/', Some('*')) => source.block_comment(&chars, i),
                ('"', _) => source.string(&chars, i + 1, None),
                ('r', _) if !source.in_word() || source.code.ends_with(['b', 'c']) => match raw_string(&chars, i) {
                    Some((start, hashes)) => source.string(&chars, start, Some(hashes)),
                    None => source.keep(&chars, i),
                },
                ('\'', Some('\\')) => char_end(&chars, i),
                ('\'', Some(_)) if chars.get(i + 2) == Some(&'\'') => i + 3,
                _ => source.keep(&chars, i),
            };
        }
        source.test_ranges = test_ranges(&source.code);
        source
    }

    pub fn line_of(&self, at: usize) -> usize {
        1 + self.code[..at].matches('\n').count()
    }

    pub fn is_test(&self, at: usize) -> bool {
        self.test_ranges.iter().any(|range| range.contains(&at))
    }

    /// Identifiers and keywords with their places, and every other character that is not white space.
    pub fn tokens(&self) -> Vec<(usize, &str)> {
        tokens(&self.code)
    }

    fn in_word(&self) -> bool {
        self.code.ends_with(is_word)
    }

    fn keep(&mut self, chars: &[char], i: usize) -> usize {
        self.code.push(chars[i]);
        i + 1
    }

    fn block_comment(&mut self, chars: &[char], start: usize) -> usize {
        let (mut i, mut depth) = (start, 0);
        while i < chars.len() {
            match (chars[i], chars.get(i + 1)) {
                ('/', Some('*')) => (depth, i) = (depth + 1, i + 2),
                ('*', Some('/')) => (depth, i) = (depth - 1, i + 2),
                ('\n', _) => i = self.keep(chars, i),
                _ => i += 1,
            }
            if depth == 0 {
                break;
            }
        }
        i
    }

    /// `hashes` is `None` where escapes count.
    fn string(&mut self, chars: &[char], start: usize, hashes: Option<usize>) -> usize {
        let at = self.code.len();
        self.code.push('"');
        let (mut i, mut text) = (start, String::new());
        while i < chars.len() {
            match (chars[i], hashes) {
                ('"', None) => break,
                ('"', Some(n)) if chars[i + 1..].iter().take_while(|c| **c == '#').take(n).count() == n => break,
                ('\\', None) => {
                    text.extend(chars.get(i + 1));
                    i += 2;
                    continue;
                }
                ('\n', _) => self.code.push('\n'),
                _ => {}
            }
            text.push(chars[i]);
            i += 1;
        }
        self.code.push('"');
        self.strings.push(Literal { text, at });
        i + 1 + hashes.unwrap_or(0)
    }

    fn declarations(&self) -> Vec<Declaration> {
        let tokens = self.tokens();
        let word = |i: usize| tokens.get(i).map_or("", |token| token.1);
        let mut found = Vec::new();
        // Which inline module each open brace belongs to, if any, and where the attributes of the next item began.
        let (mut open, mut item) = (Vec::<Option<&str>>::new(), 0);
        for (i, (at, token)) in tokens.iter().enumerate() {
            match *token {
                "mod" if word(i + 2) == ";" => {
                    let name = word(i + 1);
                    let folder: PathBuf = open.iter().flatten().collect();
                    let path =
                        self.strings.iter().find(|s| (item..*at).contains(&s.at) && self.code[item..s.at].contains("path"));
                    found.push(Declaration {
                        candidates: vec![folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")],
                        explicit: path.map(|literal| PathBuf::from(&literal.text)),
                        test_only: self.is_test(*at),
                    });
                }
                "include" if word(i + 1) == "!" => {
                    let named = self.strings.iter().find(|s| s.at > *at);
                    found.push(Declaration {
                        candidates: Vec::new(),
                        explicit: named.map(|literal| PathBuf::from(&literal.text)),
                        test_only: self.is_test(*at),
                    });
                }
                "{" => {
                    open.push((i >= 2 && word(i - 2) == "mod").then(|| word(i - 1)));
                    item = at + 1;
                }
                "}" => {
                    open.pop();
                    item = at + 1;
                }
                ";" => item = at + 1,
                _ => {}
            }
        }
        found
    }
}

/// Every file that belongs to a crate whose root is one of `roots`, and whether it exists for tests only. `read` gives a
/// file's text, or `None` where there is no such file.
pub fn reachable(roots: &[(PathBuf, bool)], read: impl Fn(&Path) -> Option<String>) -> BTreeMap<PathBuf, bool> {
    let mut found = BTreeMap::new();
    let mut queue: Vec<(PathBuf, bool, bool)> = roots.iter().map(|(path, test)| (path.clone(), *test, true)).collect();
    while let Some((file, test, root)) = queue.pop() {
        // A file reached as test code may be reached again as product code, which then decides.
        if found.get(&file).is_some_and(|known| !known || test) {
            continue;
        }
        let Some(text) = read(&file) else { continue };
        let home = file.parent().unwrap_or(Path::new("")).to_path_buf();
        let owns_folder = root || file.file_name().is_some_and(|name| name == "mod.rs");
        let modules = if owns_folder { home.clone() } else { file.with_extension("") };
        for declaration in Source::parse(&text).declarations() {
            let test = test || declaration.test_only;
            match declaration.explicit {
                Some(path) => queue.push((plain(&home.join(path)), test, true)),
                None => queue.extend(declaration.candidates.iter().map(|path| (modules.join(path), test, false))),
            }
        }
        found.insert(file, test);
    }
    found
}

/// The path without `..`, so that a file has one name however it is reached.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, component| {
        match component {
            Component::ParentDir => drop(plain.pop()),
            other => plain.push(other),
        }
        plain
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn tokens(code: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut rest = code.char_indices().peekable();
    while let Some((at, c)) = rest.next() {
        let mut end = at + c.len_utf8();
        if is_word(c) {
            while let Some((next, c)) = rest.next_if(|(_, c)| is_word(*c)) {
                end = next + c.len_utf8();
            }
        }
        if !c.is_whitespace() {
            found.push((at, &code[at..end]));
        }
    }
    found
}

fn line_end(chars: &[char], start: usize) -> usize {
    chars[start..].iter().position(|c| *c == '\n').map_or(chars.len(), |length| start + length)
}

/// The end of an escaped character literal that begins at `start`.
fn char_end(chars: &[char], start: usize) -> usize {
    let closing = (start + 3..chars.len()).find(|i| chars[*i] == '\'');
    closing.map_or(chars.len(), |i| i + 1)
}

/// Where the text of the raw string begins whose `r` stands at `start`, and its number of hashes.
fn raw_string(chars: &[char], start: usize) -> Option<(usize, usize)> {
    let hashes = chars[start + 1..].iter().take_while(|c| **c == '#').count();
    (chars.get(start + 1 + hashes) == Some(&'"')).then_some((start + 2 + hashes, hashes))
}

/// Where items stand that are compiled for tests only: from their attribute to their closing brace or semicolon.
fn test_ranges(code: &str) -> Vec<Range<usize>> {
    let all = tokens(code);
    let mut found: Vec<Range<usize>> = Vec::new();
    for i in 0..all.len() {
        let (start, inside) = (all[i].0, found.last().is_some_and(|range| range.end > all[i].0));
        if inside || all[i].1 != "#" || all.get(i + 2).map(|t| t.1) != Some("cfg") {
            continue;
        }
        let Some(length) = all[i..].iter().position(|t| t.1 == "]") else { continue };
        let condition: Vec<&str> = all[i..i + length].iter().map(|t| t.1).collect();
        if !condition.contains(&"test") || condition.contains(&"not") {
            continue;
        }
        // `;` and braces inside parentheses and brackets (array types, attributes) do not end the item.
        let (mut nested, mut braces) = (0_i32, 0_i32);
        for (at, token) in &all[i + length + 1..] {
            match *token {
                "(" | "[" => nested += 1,
                ")" | "]" => nested -= 1,
                "{" => braces += 1,
                "}" => braces -= 1,
                _ => {}
            }
            if nested == 0 && braces == 0 && (*token == ";" || *token == "}") {
                found.push(start..at + 1);
                break;
            }
        }
    }
    found
}

mod tests {
    use super::*;

    fn strings(text: &str) -> Vec<String> {
        Source::parse(text).strings.into_iter().map(|literal| literal.text).collect()
    }

    #[test]
    fn comments_and_literals_are_not_code() {
        let rows = [
            ("a /* b /* c */ d */ e", "a  e"),
            ("a // \"b\"\nc", "a \nc"),
            ("f(\"x // y\")", "f(\"\")"),
            (r#"f("a\"b")"#, "f(\"\")"),
            ("f(r#\"a\"b\"#)", "f(\"\")"),
            ("f(br\"a\\\")", "f(b\"\")"),
            ("r#type", "r#type"),
            ("for\"x\"", "for\"\""),
            ("g('\"', '\\'', '\\u{1}')", "g(, , )"),
            ("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)"),
            ("\"a\nb\"", "\"\n\""),
        ];
        for (text, code) in rows {
            assert_eq!(Source::parse(text).code, code, "{text}");
        }
        assert_eq!(strings(r##"f("a\"b", r#"c"d"#, b"e")"##), ["a\"b", "c\"d", "e"]);
    }

    #[test]
    fn test_code_is_told_apart() {
        let text = r#"
            fn product() -> [u8; 2] { "one" }
            #[cfg(test)] #[allow(dead_code)] fn helper(x: [u8; 2]) { if x { "two" } }
            #[cfg(not(test))] fn other() { "three" }
            #[cfg(all(test, unix))] mod tests { fn f() { "four" } }
            #[cfg(test)] const X: [&str; 1] = ["five"];
            fn last() { "six" }
        "#;
        let source = Source::parse(text);
        let product: Vec<&str> = source.strings.iter().filter(|s| !source.is_test(s.at)).map(|s| s.text.as_str()).collect();
        assert_eq!(product, ["one", "three", "six"]);
        assert_eq!(source.line_of(source.strings[1].at), 3);
    }

    #[test]
    fn modules_are_followed_and_nothing_else_is_reachable() {
        let files = BTreeMap::from([
            ("src/lib.rs", "pub mod a; mod inline { mod deep; } #[cfg(test)] mod tests; // mod comment;"),
            ("src/a.rs", "mod b; const X: &str = \"mod literal;\"; #[path = \"elsewhere/odd.rs\"] mod c;"),
            ("src/a/b.rs", "#[cfg(test)]\nmod tests;"),
            ("src/a/b/tests.rs", ""),
            ("src/elsewhere/odd.rs", "include!(\"part.rs\");"),
            ("src/elsewhere/part.rs", ""),
            ("src/inline/deep.rs", ""),
            ("src/tests.rs", "mod more;"),
            ("src/tests/more.rs", ""),
            ("src/comment.rs", ""),
            ("src/literal.rs", ""),
            ("src/b.rs", ""),
        ]);
        let found = reachable(&[("src/lib.rs".into(), false)], |path| Some(files.get(path.to_str()?)?.to_string()));
        let names = |test: bool| -> Vec<&str> {
            found.iter().filter(|(_, only_test)| **only_test == test).filter_map(|(path, _)| path.to_str()).collect()
        };
        assert_eq!(
            names(false),
            ["src/a/b.rs", "src/a.rs", "src/elsewhere/odd.rs", "src/elsewhere/part.rs", "src/inline/deep.rs", "src/lib.rs"]
        );
        assert_eq!(names(true), ["src/a/b/tests.rs", "src/tests/more.rs", "src/tests.rs"]);
    }

    #[test]
    fn product_code_wins_where_a_file_is_reached_twice() {
        let files = BTreeMap::from([
            ("src/lib.rs", "mod shared;"),
            ("src/shared.rs", ""),
            ("tests/t.rs", "#[path = \"../src/shared.rs\"] mod s;"),
        ]);
        for roots in [[("tests/t.rs", true), ("src/lib.rs", false)], [("src/lib.rs", false), ("tests/t.rs", true)]] {
            let roots = roots.map(|(path, test)| (PathBuf::from(path), test));
            let found = reachable(&roots, |path| Some(files.get(path.to_str()?)?.to_string()));
            assert_eq!(found.get(Path::new("src/shared.rs")), Some(&false));
        }
    }
}
