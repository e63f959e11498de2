//! Pretended servers of sources as processes, and whoever edits them over their own APIs.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use reqwest::{Certificate, Client, Method};
use serde_json::{Value, json};

use crate::control::binary;
use crate::gateway::Folder;
use crate::world::DEADLINE;

/// The simulator of this very tree, built if it is not there. `GROUPCAST_SIM_BIN` names another.
fn simulator() -> PathBuf {
    if let Some(path) = std::env::var_os("GROUPCAST_SIM_BIN") {
        return path.into();
    }
    let beside = binary().with_file_name("groupcast-sim");
    let folder = beside.parent().and_then(|profile| profile.parent()).expect("the target folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", "groupcast-simulator", "--bin", "groupcast-sim"]);
    if beside.parent().is_some_and(|profile| profile.ends_with("release")) {
        cargo.arg("--release");
    }
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", folder);
    assert!(cargo.status().expect("cargo runs").success(), "the simulator cannot be built");
    beside
}

/// A pretended server. Ends with its value.
pub struct Fake {
    child: Child,
    pub url: String,
    /// Where a client's certificate is asked for; without TLS the same.
    pub internal_url: String,
    http: Client,
    /// What says who asks.
    token: (&'static str, String),
    folder: Folder,
}

impl Fake {
    /// `cloud-controller` or `neutron`, with TLS or without.
    async fn start(kind: &str, tls: bool) -> Self {
        let folder = Folder::new("fake");
        let mut command = Command::new(simulator());
        command.args(["fake", kind]).stdin(Stdio::null()).stdout(Stdio::piped());
        if tls {
            command.arg("--tls").arg(&folder.0);
        }
        let mut child = command.spawn().expect("it starts");
        let output = child.stdout.take().expect("its output");
        let lines: Vec<String> = BufReader::new(output).lines().take(if tls { 5 } else { 1 }).map_while(Result::ok).collect();
        let url = |line: usize| lines.get(line).and_then(|line| line.split_whitespace().next()).map(str::to_owned);
        // The first test of a process installs it for all.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let mut builder = Client::builder().no_proxy().timeout(DEADLINE);
        if tls {
            let authority = std::fs::read(folder.0.join("ca.pem")).expect("written by the server");
            builder = builder.tls_certs_only(Certificate::from_pem_bundle(&authority).expect("certificates"));
        }
        let (first, second) = (url(0).expect("a URL"), url(1));
        let internal_url = second.unwrap_or_else(|| first.clone());
        let http = builder.build().expect("a client");
        Self { child, url: first, internal_url, http, token: ("authorization", String::new()), folder }
    }

    pub async fn cloud_controller() -> Self {
        let mut fake = Self::start("cloud-controller", false).await;
        let form = "grant_type=client_credentials&client_id=groupcast&client_secret=secret";
        let (_, answer) = fake.send(Method::POST, "/oauth/token", form.to_owned()).await;
        fake.token.1 = format!("bearer {}", answer["access_token"].as_str().expect("a token"));
        fake
    }

    /// Over TLS, and for the source with a certificate of its own.
    pub async fn neutron() -> Self {
        let mut fake = Self::start("neutron", true).await;
        let credential = json!({"id": "application", "secret": "secret"});
        let login = json!({"auth": {"identity": {"methods": ["application_credential"], "application_credential": credential}}});
        let request = fake.http.post(format!("{}/v3/auth/tokens", fake.url)).body(login.to_string());
        let answer = request.send().await.expect("an answer");
        let token = answer.headers().get("x-subject-token").expect("a token").to_str().expect("text").to_owned();
        fake.token = ("x-auth-token", token);
        fake
    }

    /// Status and what it says.
    async fn send(&self, method: Method, path: &str, body: String) -> (u16, Value) {
        let request = self.http.request(method, format!("{}{path}", self.url)).header(self.token.0, &self.token.1);
        let answer = request.body(body).send().await.expect("an answer");
        let status = answer.status().as_u16();
        let text = answer.text().await.expect("text");
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Asks for something that must succeed.
    pub async fn does(&self, method: Method, path: &str, body: &Value) -> Value {
        let (status, answer) = self.send(method.clone(), path, body.to_string()).await;
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    /// A secret in a file, as a source reads it.
    pub fn secret(&self) -> String {
        let path = self.folder.0.join("secret");
        std::fs::write(&path, "secret").expect("written");
        path.display().to_string()
    }

    /// `[[source]]` of a Neutron, called `os`.
    pub fn neutron_source(&self, more: &str) -> String {
        let path = |name: &str| self.folder.0.join(name).display().to_string();
        format!(
            "[[source]]\nid = 'os'\nkind = 'neutron'\nurl = '{url}'\nauth_url = '{url}/v3'\napplication_credential_id = 'application'\n\
             application_credential_secret_file = '{}'\nca_file = '{}'\nclient_cert_file = '{}'\nclient_key_file = '{}'\n{more}\n",
            self.secret(),
            path("ca.pem"),
            path("client.pem"),
            path("client.key"),
            url = self.internal_url,
        )
    }

    /// A security group of a Cloud Controller for a space; the id it has with us.
    pub async fn space_group(&self, name: &str, space: &str) -> String {
        let body = json!({
            "name": name,
            "rules": [{"protocol": "tcp", "destination": "192.0.2.0/24", "ports": "443"}],
            "relationships": {"running_spaces": {"data": [{"guid": space}]}},
        });
        let created = self.does(Method::POST, "/v3/security_groups", &body).await;
        format!("cf-{}", created["guid"].as_str().expect("a guid"))
    }

    /// A security group of Neutron with these rules and none of those it begins with; its id.
    pub async fn neutron_group(&self, name: &str, rules: &[Value]) -> String {
        let made = self.does(Method::POST, "/v2.0/security-groups", &json!({"security_group": {"name": name}})).await;
        let group = &made["security_group"];
        let id = group["id"].as_str().expect("an id").to_owned();
        for rule in group["security_group_rules"].as_array().expect("rules") {
            self.delete("security-group-rules", rule["id"].as_str().expect("an id")).await;
        }
        for rule in rules {
            self.neutron_rule(&id, rule.clone()).await;
        }
        id
    }

    pub async fn neutron_rule(&self, group: &str, mut rule: Value) -> String {
        rule["security_group_id"] = json!(group);
        let made = self.does(Method::POST, "/v2.0/security-group-rules", &json!({"security_group_rule": rule})).await;
        made["security_group_rule"]["id"].as_str().expect("an id").to_owned()
    }

    /// A port on network `net`; its id.
    pub async fn port(&self, host: &str, address: &str, groups: &[&str], more: Value) -> String {
        let mut port = json!({
            "name": address, "network_id": "net", "project_id": "p1", "security_groups": groups, "binding:host_id": host,
            "fixed_ips": [{"subnet_id": "s1", "ip_address": address}], "allowed_address_pairs": [], "device_owner": "compute:nova",
            "port_security_enabled": true,
        });
        for (field, value) in more.as_object().expect("fields") {
            port[field] = value.clone();
        }
        let made = self.does(Method::POST, "/v2.0/ports", &json!({ "port": port })).await;
        made["port"]["id"].as_str().expect("an id").to_owned()
    }

    pub async fn update_port(&self, id: &str, fields: Value) {
        self.does(Method::PUT, &format!("/v2.0/ports/{id}"), &json!({ "port": fields })).await;
    }

    /// Deletes something of Neutron's.
    pub async fn delete(&self, list: &str, id: &str) {
        self.does(Method::DELETE, &format!("/v2.0/{list}/{id}"), &Value::Null).await;
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
