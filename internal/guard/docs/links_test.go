package docs

import (
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// link leads from a document to somewhere.
type link struct {
	line   int
	target string
}

func linkPattern() *regexp.Regexp { return regexp.MustCompile(`\[([^\]]*)\]\(([^)\s]*)[^)]*\)`) }

// links are those of the text, also where they begin on one line and end on the
// next.
func (d *document) links() []link {
	var text strings.Builder
	var numbers []int // by offset
	for _, l := range d.lines {
		plain := spanPattern().ReplaceAllStringFunc(l.text, func(s string) string { return strings.Repeat("x", len(s)) })
		text.WriteString(plain + "\n")
		for range len(plain) + 1 {
			numbers = append(numbers, l.number)
		}
	}
	var all []link
	for _, pattern := range []*regexp.Regexp{
		linkPattern(), regexp.MustCompile(`(src|href)="([^"]*)"`), regexp.MustCompile(`()(https?://[^\s)>"]+)`),
	} {
		for _, at := range pattern.FindAllStringSubmatchIndex(text.String(), -1) {
			all = append(all, link{numbers[at[4]], text.String()[at[4]:at[5]]})
		}
	}
	return all
}

// hosts are those on the internet that documents may link to. Tests cannot look
// whether pages are there, so there should be few.
func hosts() []string { return []string{"github.com", "kubernetes.io"} }

// site is what links can lead to.
type site struct {
	documents map[string]*document
	folders   map[string]bool
	files     []string
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{documents: map[string]*document{}, folders: map[string]bool{".": true}, files: files(t)}
	for _, d := range documents(t) {
		s.documents[d.path] = d
	}
	for _, file := range s.files {
		for folder := path.Dir(file); folder != "."; folder = path.Dir(folder) {
			s.folders[folder] = true
		}
	}
	return s
}

// has says whether there is a file or a folder.
func (s *site) has(name string) bool {
	_, found := slices.BinarySearch(s.files, name)
	return found || s.folders[name]
}

// page is the document that one sees at a path: a folder shows its README.
func (s *site) page(name string) *document {
	if s.folders[name] {
		name = path.Join(name, "README.md")
	}
	return s.documents[name]
}

// check says what is wrong with a link.
func (s *site) check(from *document, target string) string {
	if strings.Contains(target, ":") {
		u, err := url.Parse(target)
		if err != nil || u.Scheme != "https" || !slices.Contains(hosts(), u.Host) {
			return "want a file, or https and a host of hosts()"
		}
		return ""
	}
	file, anchor, hasAnchor := strings.Cut(target, "#")
	name := path.Join(path.Dir(from.path), file)
	if file == "" {
		name = from.path
	}
	if !s.has(name) {
		return "there is no " + name
	}
	if !hasAnchor {
		return ""
	}
	page := s.page(name)
	if page == nil || !slices.ContainsFunc(page.titles, func(h heading) bool { return h.slug == anchor }) {
		return "there is no such title in " + name
	}
	return ""
}

func TestLinksLeadSomewhere(t *testing.T) {
	s := newSite(t)
	for _, d := range s.documents {
		for _, l := range d.links() {
			if fault := s.check(d, l.target); fault != "" {
				t.Errorf("%s:%d: link to %q: %s", d.path, l.line, l.target, fault)
			}
		}
		for _, l := range d.lines {
			if regexp.MustCompile(`^ {0,3}\[[^\]]+\]: `).MatchString(l.text) {
				t.Errorf("%s:%d: %q, want links where they are used: only those are tested", d.path, l.number, l.text)
			}
		}
	}
}

// TestEveryDocumentIsReachable from the README, link by link.
func TestEveryDocumentIsReachable(t *testing.T) {
	s := newSite(t)
	reached := map[string]bool{"README.md": true}
	for queue := []string{"README.md"}; len(queue) > 0; queue = queue[1:] {
		d := s.documents[queue[0]]
		for _, l := range d.links() {
			target, _, _ := strings.Cut(l.target, "#")
			page := s.page(path.Join(path.Dir(d.path), target))
			if target != "" && page != nil && !reached[page.path] {
				reached[page.path] = true
				queue = append(queue, page.path)
			}
		}
	}
	for name := range s.documents {
		if !reached[name] {
			t.Errorf("no way of links leads from README.md to %s", name)
		}
	}
}

// TestAnchorsAreThoseOfGitHub, as far as our titles need them.
func TestAnchorsAreThoseOfGitHub(t *testing.T) {
	before := map[string]int{}
	for _, c := range [][2]string{
		{"Where do I change…", "where-do-i-change"},
		{"What the node must have", "what-the-node-must-have"},
		{"`nftables` & [ipvs](x.md), 6.1!", "nftables--ipvs-61"},
		{"Unreleased", "unreleased"},
		{"Unreleased", "unreleased-1"},
	} {
		if got := slug(c[0], before); got != c[1] {
			t.Errorf("the anchor of %q is %q, want %q", c[0], got, c[1])
		}
	}
}
