package debughttp

import (
	"embed"
	"net/http"
	"path"
	"strconv"
)

//go:embed page
var files embed.FS

// page is a file for the browser.
type page struct {
	contentType string
	content     []byte
}

// pages returns all files by name; index.html also has the empty name.
func pages() map[string]page {
	all := map[string]page{}
	entries, err := files.ReadDir("page")
	if err != nil {
		panic(err) // cannot happen: the files are embedded
	}
	for _, entry := range entries {
		content, err := files.ReadFile(path.Join("page", entry.Name()))
		if err != nil {
			panic(err)
		}
		all[entry.Name()] = page{contentType: contentType(entry.Name()), content: content}
	}
	all[""] = all["index.html"]
	return all
}

// contentType does not use package mime, whose tables depend on the system.
func contentType(name string) string {
	switch path.Ext(name) {
	case ".html":
		return "text/html; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	default:
		return "application/octet-stream"
	}
}

func (p page) serve(w http.ResponseWriter) {
	w.Header().Set("Content-Type", p.contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(p.content)))
	_, _ = w.Write(p.content) // fails only if the client is gone
}
