// Renders the templates of a chart with its default values, each into a file of its own, by the engine that Helm uses: Go's
// text/template, with those of Helm's functions that the templates call. packaging/kubernetes/render starts it.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"sort"
	"strings"
	"text/template"
)

// What needs no quotes in YAML, whatever reads it.
var plain = regexp.MustCompile(`^[A-Za-z/][A-Za-z0-9._/-]*$`)
var reserved = regexp.MustCompile(`^(?i:y|n|yes|no|on|off|true|false|null)$`)

func scalar(value interface{}) string {
	text, isText := value.(string)
	if isText && plain.MatchString(text) && !reserved.MatchString(text) {
		return text
	}
	encoded, err := json.Marshal(value)
	check(err)
	return string(encoded)
}

// Returns a value in YAML's block style, as Helm's toYaml does.
func toYaml(value interface{}) string {
	var lines []string
	add := func(head string, value interface{}) {
		kind := reflect.ValueOf(value).Kind()
		if (kind != reflect.Map && kind != reflect.Slice) || reflect.ValueOf(value).Len() == 0 {
			lines = append(lines, head+" "+scalar(value))
		} else if head == "-" {
			lines = append(lines, "- "+strings.TrimPrefix(indent(2, toYaml(value)), "  "))
		} else if kind == reflect.Slice {
			lines = append(lines, head, toYaml(value))
		} else {
			lines = append(lines, head, indent(2, toYaml(value)))
		}
	}
	switch value := value.(type) {
	case map[string]interface{}:
		keys := make([]string, 0, len(value))
		for key := range value {
			keys = append(keys, key)
		}
		sort.Strings(keys)
		for _, key := range keys {
			add(scalar(key)+":", value[key])
		}
	case []interface{}:
		for _, each := range value {
			add("-", each)
		}
	}
	if lines == nil {
		return scalar(value)
	}
	return strings.Join(lines, "\n")
}

func indent(spaces int, text string) string {
	pad := strings.Repeat(" ", spaces)
	return pad + strings.ReplaceAll(text, "\n", "\n"+pad)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "packaging/kubernetes/render:", err)
		os.Exit(1)
	}
}

func main() {
	chart, output := os.Args[1], os.Args[2]
	var data map[string]interface{}
	check(json.NewDecoder(os.Stdin).Decode(&data))
	engine := template.New("chart").Option("missingkey=error")
	engine.Funcs(template.FuncMap{
		"toYaml":  toYaml,
		"nindent": func(spaces int, text string) string { return "\n" + indent(spaces, text) },
		"quote":   func(value interface{}) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"default": func(other, value interface{}) interface{} {
			if value == nil || reflect.ValueOf(value).IsZero() {
				return other
			}
			return value
		},
		"include": func(name string, data interface{}) (string, error) {
			var text bytes.Buffer
			err := engine.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
	})
	_, err := engine.ParseGlob(filepath.Join(chart, "templates", "*"))
	check(err)
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*.yaml"))
	check(err)
	for _, file := range files {
		var text bytes.Buffer
		check(engine.ExecuteTemplate(&text, filepath.Base(file), data))
		check(os.WriteFile(filepath.Join(output, filepath.Base(file)), append(bytes.TrimRight(text.Bytes(), "\n"), '\n'), 0o644))
	}
}
